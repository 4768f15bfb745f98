//! The table behind the handles of a device.
use crate::DeviceId;

/// A table whose places are reused under a new generation. `get` and `remove` answer `None` for a handle whose
/// resource is gone, whatever took its place since.
#[derive(Debug)]
pub struct Slab<T> {
    places: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { places: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Keeps `value` and returns its handle.
    pub fn insert<H: From<(DeviceId, u32, u32)>>(&mut self, device: DeviceId, value: T) -> H {
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push((0, None));
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[index as usize];
        place.1 = Some(value);
        H::from((device, index, place.0))
    }
    /// The resource at `index`, if it is still of `generation`.
    pub fn get(&self, index: u32, generation: u32) -> Option<&T> {
        self.places.get(index as usize).filter(|p| p.0 == generation)?.1.as_ref()
    }
    /// The resource at `index`, if it is still of `generation`.
    pub fn get_mut(&mut self, index: u32, generation: u32) -> Option<&mut T> {
        self.places.get_mut(index as usize).filter(|p| p.0 == generation)?.1.as_mut()
    }
    /// Takes the resource out; its handle is stale from now on.
    pub fn remove(&mut self, index: u32, generation: u32) -> Option<T> {
        let place = self.places.get_mut(index as usize).filter(|p| p.0 == generation)?;
        let value = place.1.take()?;
        place.0 += 1;
        self.free.push(index);
        Some(value)
    }
    /// How many resources are kept.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }
    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
