//! A buffer that is owned, and freed when its last use has completed.
use crate::{
    Result,
    contract::{BufferDesc, BufferId, DataType, Device, Element, Memory, Range},
    span::Span,
};
use std::sync::Arc;

/// Elements of one type on one device. Dropping it makes its handle stale at once; the device frees the memory when
/// the last call that uses it has completed.
pub struct Buffer {
    device: Arc<dyn Device>,
    id: BufferId,
    dtype: DataType,
    len: u64,
}

impl Buffer {
    /// `len` elements in the device's own memory, of undefined content.
    pub fn new(device: &Arc<dyn Device>, dtype: DataType, len: u64) -> Result<Self> {
        let size = (len * dtype.size()).max(4);
        let id = device.create_buffer(&BufferDesc { size, memory: Memory::Device, exportable: false })?;
        Ok(Buffer { device: device.clone(), id, dtype, len })
    }
    /// The elements of `data`.
    pub fn from_slice<T: Element>(device: &Arc<dyn Device>, data: &[T]) -> Result<Self> {
        let buffer = Buffer::new(device, T::TYPE, data.len() as u64)?;
        buffer.write(data)?;
        Ok(buffer)
    }
    /// Its handle, for spans of one's own.
    pub fn id(&self) -> BufferId {
        self.id
    }
    /// Its device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }
    /// Element type.
    pub fn dtype(&self) -> DataType {
        self.dtype
    }
    /// Elements.
    pub fn len(&self) -> u64 {
        self.len
    }
    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// All of it.
    pub fn span(&self) -> Span {
        self.slice(0, self.len)
    }
    /// `count` elements from `start`.
    pub fn slice(&self, start: u64, count: u64) -> Span {
        Span::of(self.id, self.dtype, start, count)
    }
    /// Writes from element 0. No call may be using the buffer.
    ///
    /// # Panics
    /// If `T` is not of the buffer's type.
    pub fn write<T: Element>(&self, data: &[T]) -> Result<()> {
        assert_eq!(T::TYPE, self.dtype, "the buffer holds {}", self.dtype);
        self.write_bytes(0, bytemuck::cast_slice(data))
    }
    /// All elements. No call may be writing the buffer.
    ///
    /// # Panics
    /// If `T` is not of the buffer's type.
    pub fn read<T: Element>(&self) -> Result<Vec<T>> {
        assert_eq!(T::TYPE, self.dtype, "the buffer holds {}", self.dtype);
        let mut data = vec![T::zeroed(); self.len as usize];
        self.read_bytes(0, bytemuck::cast_slice_mut(&mut data))?;
        Ok(data)
    }
    /// Writes bytes from byte `offset`.
    pub fn write_bytes(&self, offset: u64, data: &[u8]) -> Result<()> {
        Ok(self.device.write(Range::new(self.id, offset, data.len() as u64), data)?)
    }
    /// Reads bytes from byte `offset`.
    pub fn read_bytes(&self, offset: u64, data: &mut [u8]) -> Result<()> {
        Ok(self.device.read(Range::new(self.id, offset, data.len() as u64), data)?)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.device.destroy_buffer(self.id);
    }
}
