//! Every kernel goes through the driver's compiler, also on drivers without a device, which compile for hardware that
//! is not there (`RADV_FORCE_FAMILY` of Mesa's RADV).
use allhands_contract::Error;
use allhands_vulkan::{Selector, VulkanDevice, adapters, compile_all};

#[test]
fn every_kernel_compiles_for_every_device() {
    for adapter in adapters() {
        let compiled = match compile_all(&Selector::Index(adapter.index)) {
            Ok(compiled) => compiled,
            // A driver that cannot have kernels says what it lacks for them.
            Err(e) if e.to_string().contains("could not be opened: it lacks") => {
                println!("{e}");
                continue;
            }
            Err(e) => panic!("{e}"),
        };
        println!("{} ({}): {compiled} pipelines", adapter.name, adapter.driver);
        assert!(compiled > 0);
    }
}

#[test]
fn what_is_not_there_is_refused_with_what_is() {
    let there = adapters();
    for selector in
        [Selector::Index(there.len()), Selector::Name("no such device".into()), Selector::Pci("ffff:ff:1f.7".into())]
    {
        let Err(Error::Open { what }) = VulkanDevice::open(&selector).map(|_| ()) else {
            panic!("{selector:?} opened")
        };
        match there.first() {
            Some(first) => assert!(what.contains(&first.name), "{what}"),
            None => assert!(what.contains("no Vulkan"), "{what}"),
        }
    }
}

#[test]
fn a_device_opens_or_says_why_not() {
    for adapter in adapters() {
        match VulkanDevice::open(&Selector::Index(adapter.index)) {
            Ok(device) => drop(device),
            Err(Error::Open { what }) => {
                println!("{what}");
                assert!(what.contains(&adapter.name) && what.contains("could not be opened: "), "{what}");
            }
            Err(other) => panic!("{other}"),
        }
    }
}
