//! The kernels of a device, from WGSL by way of SPIR-V, compiled at first use.
use crate::{
    gpu::Gpu,
    instance::Physical,
    spirv::{FloatControls, harden},
};
use allhands_contract::{DataType, Error, ReduceOp, Result, kernels};
use ash::vk;
use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

/// Few are met in practice: a rank's place in the fold, and whether it is in place, make a layout.
type Key = (ReduceOp, DataType, kernels::Layout);

/// One layout for all kernels, and the pipelines made so far.
pub(crate) struct Pipelines {
    floats: FloatControls,
    pub bindings: vk::DescriptorSetLayout,
    pub layout: vk::PipelineLayout,
    compiled: Mutex<HashMap<Key, vk::Pipeline>>,
}

impl Pipelines {
    pub fn new(device: &ash::Device, floats: FloatControls) -> std::result::Result<Self, String> {
        let binding = |i| {
            vk::DescriptorSetLayoutBinding::default()
                .binding(i)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .descriptor_count(1)
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
        };
        let entries: [_; kernels::BINDINGS] = std::array::from_fn(|i| binding(i as u32));
        let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(&entries);
        // SAFETY: the bindings are consecutive, and the device was checked to take as many.
        let bindings = unsafe { device.create_descriptor_set_layout(&info, None) }
            .map_err(|e| format!("vkCreateDescriptorSetLayout: {e:?}"))?;
        let constants =
            [vk::PushConstantRange::default().stage_flags(vk::ShaderStageFlags::COMPUTE).size(kernels::PARAMS_SIZE)];
        let sets = [bindings];
        let info = vk::PipelineLayoutCreateInfo::default().set_layouts(&sets).push_constant_ranges(&constants);
        // SAFETY: the set layout is this device's, and the device was checked to take constants of that size.
        match unsafe { device.create_pipeline_layout(&info, None) } {
            Ok(layout) => Ok(Pipelines { floats, bindings, layout, compiled: Mutex::default() }),
            Err(e) => {
                // SAFETY: nothing was made with it.
                unsafe { device.destroy_descriptor_set_layout(bindings, None) };
                Err(format!("vkCreatePipelineLayout: {e:?}"))
            }
        }
    }

    /// The pipeline for a pair and a layout, compiled if this is its first use. It lives as long as the device.
    pub fn get(&self, gpu: &Gpu, op: ReduceOp, dtype: DataType, layout: kernels::Layout) -> Result<vk::Pipeline> {
        self.compile(gpu.vk(), op, dtype, layout).map_err(|why| match why {
            Some(why) => gpu.refused("compile a kernel", format!("{op} on {dtype}: {why}")),
            None => Error::NoKernel { device: gpu.id, op, dtype },
        })
    }

    /// The same without a device of ours; `None` if there is no such kernel.
    pub fn compile(
        &self,
        device: &ash::Device,
        op: ReduceOp,
        dtype: DataType,
        layout: kernels::Layout,
    ) -> std::result::Result<vk::Pipeline, Option<String>> {
        let key = (op, dtype, layout);
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = compiled.get(&key) {
            return Ok(*pipeline);
        }
        let source = kernels::source(op, dtype, &key.2).ok_or(None)?;
        let code = spirv(&source, self.floats).map_err(Some)?;
        let info = vk::ShaderModuleCreateInfo::default().code(&code);
        // SAFETY: the code is a valid module, whose capabilities the device has.
        let module = unsafe { device.create_shader_module(&info, None) }
            .map_err(|e| Some(format!("vkCreateShaderModule: {e:?}")))?;
        let stage = vk::PipelineShaderStageCreateInfo::default()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(module)
            .name(c"reduce");
        let infos = [vk::ComputePipelineCreateInfo::default().stage(stage).layout(self.layout)];
        // SAFETY: module and layout are this device's, and the module uses just what the layout has.
        let made = unsafe { device.create_compute_pipelines(vk::PipelineCache::null(), &infos, None) };
        // SAFETY: pipelines do not use the module they were made from any more.
        unsafe { device.destroy_shader_module(module, None) };
        let pipeline = match made {
            Ok(pipelines) => pipelines[0],
            Err((_, e)) => return Err(Some(format!("vkCreateComputePipelines: {e:?}"))),
        };
        compiled.insert(key, pipeline);
        Ok(pipeline)
    }

    /// Every kernel there is on `physical`, in a few layouts. How many pipelines that are.
    pub fn compile_all(&self, device: &ash::Device, physical: &Physical) -> std::result::Result<usize, String> {
        for (op, dtype) in kernels::all(physical.int64, physical.float64) {
            for layout in layouts(op, dtype) {
                self.compile(device, op, dtype, layout)
                    .map_err(|why| format!("{op} on {dtype}: {}", why.unwrap_or_default()))?;
            }
        }
        Ok(self.compiled.lock().unwrap_or_else(PoisonError::into_inner).len())
    }

    /// # Safety
    /// `device` is the one it was made on, and nothing made with it is in use or will be.
    pub unsafe fn destroy(&mut self, device: &ash::Device) {
        let compiled = self.compiled.get_mut().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: by this function's contract.
        unsafe {
            compiled.drain().for_each(|(_, pipeline)| device.destroy_pipeline(pipeline, None));
            device.destroy_pipeline_layout(self.layout, None);
            device.destroy_descriptor_set_layout(self.bindings, None);
        }
    }
}

/// A fold of two, in and out of place; of most sources to two stores; with scales, and crossing as each narrow type,
/// where there is such.
fn layouts(op: ReduceOp, dtype: DataType) -> Vec<kernels::Layout> {
    let bound = |binding: usize, narrow| kernels::Bound { binding: (binding % kernels::BINDINGS) as u8, narrow };
    let plain = |sources: usize, stores: std::ops::Range<usize>| kernels::Layout {
        sources: (0..sources).map(|i| bound(i, false)).collect(),
        stores: stores.map(|i| bound(i, false)).collect(),
        scaled: false,
        wire: None,
    };
    let mut layouts = vec![plain(2, 2..3), plain(2, 0..1), plain(kernels::SOURCES, 0..2)];
    if op == ReduceOp::Sum && dtype.is_float() {
        layouts.push(kernels::Layout { scaled: true, ..plain(3, 0..1) });
    }
    if dtype == DataType::F32 {
        for wire in [DataType::F16, DataType::Bf16] {
            let (sources, stores) = (vec![bound(0, false), bound(1, true)], vec![bound(2, true), bound(3, false)]);
            layouts.push(kernels::Layout { sources, stores, scaled: false, wire: Some(wire) });
        }
    }
    layouts
}

/// The entry point's name, which the stage above gives as a C string.
const _: () = assert!(matches!(kernels::ENTRY.as_bytes(), b"reduce"));

/// SPIR-V of a kernel. Bounds are not checked in the shader: every loop counts up to a parameter, and a recorder binds
/// the ranges that it names, which were checked against their buffers.
fn spirv(source: &str, floats: FloatControls) -> std::result::Result<Vec<u32>, String> {
    use naga::{
        back::spv,
        valid::{Capabilities, ValidationFlags, Validator},
    };
    let module = naga::front::wgsl::parse_str(source).map_err(|e| e.emit_to_string(source))?;
    let capabilities = Capabilities::IMMEDIATES | Capabilities::SHADER_INT64 | Capabilities::FLOAT64;
    let info =
        Validator::new(ValidationFlags::all(), capabilities).validate(&module).map_err(|e| e.emit_to_string(source))?;
    let unchecked = naga::proc::BoundsCheckPolicy::Unchecked;
    let options = spv::Options {
        lang_version: (1, 3),
        flags: spv::WriterFlags::empty(),
        bounds_check_policies: naga::proc::BoundsCheckPolicies {
            index: unchecked,
            buffer: unchecked,
            image_load: unchecked,
            binding_array: unchecked,
        },
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        ..Default::default()
    };
    let entry =
        spv::PipelineOptions { shader_stage: naga::ShaderStage::Compute, entry_point: kernels::ENTRY.to_string() };
    let words = spv::write_vec(&module, &info, &options, Some(&entry)).map_err(|e| e.to_string())?;
    harden(&words, floats).ok_or_else(|| "naga made SPIR-V that cannot be read".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spirv::Rules;

    #[test]
    fn every_kernel_has_its_float_arithmetic_protected() {
        let rules = Rules { keep_nan: true, keep_subnormals: true, round_to_even: true };
        let floats = FloatControls { bits32: rules, bits64: rules };
        for (op, dtype) in kernels::all(true, true) {
            for layout in layouts(op, dtype) {
                let source = kernels::source(op, dtype, &layout).unwrap();
                let plain = spirv(&source, FloatControls::default()).unwrap();
                let hard = spirv(&source, floats).unwrap();
                // Three capabilities of 2 words, an extension of 7, three modes of 4 for each width.
                let widths = (hard.len() - plain.len()).saturating_sub(3 * 2 + 7) / (3 * 4);
                assert!(widths >= usize::from(dtype.is_float() && op != ReduceOp::Min && op != ReduceOp::Max));
                assert!(hard.len() - plain.len() == if widths == 0 { 0 } else { 3 * 2 + 7 + widths * 3 * 4 });
                let decorations =
                    |words: &[u32]| words.windows(3).filter(|w| w[0] == 3 << 16 | 71 && w[2] == 42).count();
                assert_eq!(decorations(&plain) > 0, widths > 0, "{op} {dtype} {layout:?}");
            }
        }
    }
}
