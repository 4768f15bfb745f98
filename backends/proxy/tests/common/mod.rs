//! Which devices the tests run on.
use allhands_contract::Device;
use allhands_proxy::{Backend, adapters, open};
use std::sync::Arc;

/// The devices that `ALLHANDS_DEVICES` lists (`proxy-vulkan:0,proxy-gles:0`; other backends' names are passed over),
/// each of which must open; without it, one on every adapter found.
fn devices() -> Vec<Arc<dyn Device>> {
    let Ok(list) = std::env::var("ALLHANDS_DEVICES") else {
        let found = Backend::ALL.into_iter().flat_map(adapters);
        return found.map(|a| open(a.backend, a.index).unwrap_or_else(|e| panic!("{e}"))).collect();
    };
    let mut devices = Vec::new();
    for name in list.split(',').map(str::trim).filter(|name| name.starts_with("proxy-")) {
        let (backend, index) = name.split_once(':').unwrap_or((name, "0"));
        let backend = Backend::ALL.into_iter().find(|b| b.name() == backend);
        let backend = backend.unwrap_or_else(|| panic!("{name}: no such backend"));
        let index = index.parse().unwrap_or_else(|_| panic!("{name}: no such index"));
        devices.push(open(backend, index).unwrap_or_else(|e| panic!("{e}")));
    }
    devices
}

/// Runs `test` on each, naming it where it fails.
pub fn with_devices(test: impl Fn(&Arc<dyn Device>)) {
    let devices = devices();
    if devices.is_empty() {
        println!("nothing was run: there is no device");
    }
    for device in devices {
        println!("{} {}, {}", device.info().backend, device.info().name, device.info().driver);
        test(&device);
        device.status().unwrap();
    }
}
