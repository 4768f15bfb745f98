//! The kernels of a device, compiled at first use.
use crate::{
    api::{HalResult, ProxyApi},
    gpu::Gpu,
};
use allhands_contract::{DataType, Error, ReduceOp, Result, kernels};
use std::{
    borrow::Cow,
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};
use wgpu_hal::{self as hal, Device as _};
use wgpu_types as wgt;

/// Few are met in practice: a rank's place in the fold, and whether it is in place, make a layout.
type Key = (ReduceOp, DataType, kernels::Layout);

/// One layout for all kernels, and the pipelines made so far.
pub(crate) struct Pipelines<A: ProxyApi> {
    bindings: Option<A::BindGroupLayout>,
    layout: Option<A::PipelineLayout>,
    compiled: Mutex<HashMap<Key, Arc<A::ComputePipeline>>>,
}

impl<A: ProxyApi> Pipelines<A> {
    pub fn new(device: &A::Device) -> HalResult<Self> {
        let entries: Vec<_> = (0..kernels::BINDINGS as u32)
            .map(|binding| wgt::BindGroupLayoutEntry {
                binding,
                visibility: wgt::ShaderStages::COMPUTE,
                ty: wgt::BindingType::Buffer {
                    ty: wgt::BufferBindingType::Storage { read_only: false },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            })
            .collect();
        let desc = hal::BindGroupLayoutDescriptor {
            label: None,
            flags: hal::BindGroupLayoutFlags::empty(),
            entries: &entries,
        };
        // SAFETY: the bindings are consecutive and of a type that every compute adapter has.
        let bindings = unsafe { device.create_bind_group_layout(&desc) }?;
        let desc = hal::PipelineLayoutDescriptor {
            label: None,
            flags: hal::PipelineLayoutFlags::empty(),
            bind_group_layouts: &[Some(&bindings)],
            immediate_size: kernels::PARAMS_SIZE,
        };
        // SAFETY: the layout is this device's, and the adapter was checked to take immediates of that size.
        match unsafe { device.create_pipeline_layout(&desc) } {
            Ok(layout) => Ok(Pipelines { bindings: Some(bindings), layout: Some(layout), compiled: Mutex::default() }),
            Err(e) => {
                // SAFETY: nothing was made with it.
                unsafe { device.destroy_bind_group_layout(bindings) };
                Err(e)
            }
        }
    }

    /// The layout of the group of storage buffers.
    pub fn bindings(&self) -> &A::BindGroupLayout {
        self.bindings.as_ref().expect("is there until `destroy`, which the last owner calls")
    }
    /// The layout of every pipeline.
    pub fn layout(&self) -> &A::PipelineLayout {
        self.layout.as_ref().expect("is there until `destroy`, which the last owner calls")
    }

    /// The pipeline for a pair and a layout, compiled if this is its first use.
    pub fn get(
        &self,
        gpu: &Gpu<A>,
        op: ReduceOp,
        dtype: DataType,
        layout: kernels::Layout,
    ) -> Result<Arc<A::ComputePipeline>> {
        let key = (op, dtype, layout);
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = compiled.get(&key) {
            return Ok(pipeline.clone());
        }
        let source = kernels::source(op, dtype, &key.2).ok_or(Error::NoKernel { device: gpu.id, op, dtype })?;
        gpu.status()?;
        let pipeline = gpu.guard(|| compile::<A>(gpu.device(), self.layout(), &source))?.map_err(|why| {
            Error::Invalid { device: gpu.id, what: format!("its driver refuses the kernel {op} {dtype}: {why}") }
        })?;
        let pipeline = Arc::new(pipeline);
        compiled.insert(key, pipeline.clone());
        Ok(pipeline)
    }

    /// # Safety
    /// `device` is the one it was made on, and nothing made with it is in use or will be.
    pub unsafe fn destroy(&mut self, device: &A::Device) {
        for (_, pipeline) in self.compiled.get_mut().unwrap_or_else(PoisonError::into_inner).drain() {
            if let Some(pipeline) = Arc::into_inner(pipeline) {
                // SAFETY: by this function's contract; recorders that borrowed it are gone.
                unsafe { device.destroy_compute_pipeline(pipeline) };
            }
        }
        // SAFETY: as above, and the pipelines are gone.
        unsafe {
            if let Some(layout) = self.layout.take() {
                device.destroy_pipeline_layout(layout);
            }
            if let Some(bindings) = self.bindings.take() {
                device.destroy_bind_group_layout(bindings);
            }
        }
    }
}

fn compile<A: ProxyApi>(
    device: &A::Device,
    layout: &A::PipelineLayout,
    source: &str,
) -> std::result::Result<A::ComputePipeline, String> {
    use naga::valid::{Capabilities, ValidationFlags, Validator};
    let module = naga::front::wgsl::parse_str(source).map_err(|e| e.emit_to_string(source))?;
    let capabilities = Capabilities::IMMEDIATES | Capabilities::SHADER_INT64;
    let info =
        Validator::new(ValidationFlags::all(), capabilities).validate(&module).map_err(|e| e.emit_to_string(source))?;
    let shader = hal::ShaderInput::Naga(hal::NagaShader { module: Cow::Owned(module), info, debug_source: None });
    let desc = hal::ShaderModuleDescriptor { label: None, runtime_checks: wgt::ShaderRuntimeChecks::unchecked() };
    // SAFETY: unchecked shaders must neither leave their bindings nor loop forever. Every loop counts up to a
    // parameter; a recorder binds the ranges that it names, and those were checked against their buffers.
    let shader = unsafe { device.create_shader_module(&desc, shader) }.map_err(|e| e.to_string())?;
    let desc = hal::ComputePipelineDescriptor {
        label: None,
        layout,
        stage: hal::ProgrammableStage {
            module: &shader,
            entry_point: kernels::ENTRY,
            constants: &Default::default(),
            zero_initialize_workgroup_memory: false,
        },
        cache: None,
    };
    // SAFETY: layout and module are this device's, and the module uses just what the layout has.
    let pipeline = unsafe { device.create_compute_pipeline(&desc) }.map_err(|e| e.to_string());
    // SAFETY: pipelines do not keep using the module they were made from.
    unsafe { device.destroy_shader_module(shader) };
    pipeline
}
