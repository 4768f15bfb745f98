//! What stands in for a rank that contributes nothing: a buffer full of the value that its reduction does not change
//! with. Kept for each device and value, and read again and again where the rank's input would be.
use crate::{
    Result,
    contract::{BufferDesc, Device, DeviceId, Memory, Range},
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

/// Bytes of such a buffer: a longer input is several times the same.
const SIZE: u64 = 256 << 10;

/// The buffers of a communicator.
#[derive(Default)]
pub(crate) struct Neutral(Mutex<HashMap<Key, (Arc<dyn Device>, Range)>>);

/// A device, and the bytes of the element.
type Key = (DeviceId, [u8; 8]);

impl Neutral {
    /// Memory of `device` that repeats `value`, whose length divides that of the range: the low bytes of a little-endian
    /// element, again and again.
    pub fn range(&self, device: &Arc<dyn Device>, value: &[u8]) -> Result<Range> {
        let mut key = [0; 8];
        key.iter_mut().zip(value.iter().cycle()).for_each(|(to, from)| *to = *from);
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, range)) = kept.get(&(device.info().id, key)) {
            return Ok(*range);
        }
        // Where the host reaches the memory itself, the write does not wait behind what is queued.
        let memory = if device.limits().mapped { Memory::Mapped } else { Memory::Device };
        let buffer = device.create_buffer(&BufferDesc { size: SIZE, memory, exportable: false })?;
        let range = Range::new(buffer, 0, SIZE);
        if let Err(error) = device.write(range, &key.repeat(SIZE as usize / key.len())) {
            device.destroy_buffer(buffer);
            return Err(error.into());
        }
        kept.insert((device.info().id, key), (device.clone(), range));
        Ok(range)
    }
}

impl Drop for Neutral {
    fn drop(&mut self) {
        for (device, range) in self.0.get_mut().unwrap_or_else(PoisonError::into_inner).values() {
            device.destroy_buffer(range.buffer);
        }
    }
}
