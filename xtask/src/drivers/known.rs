//! The drivers and layers that are known, each with what it is good for in a test.

use super::{Driver, Environment, Part, Release, tree};
use std::path::Path;

/// What `cargo xtask drivers` can name.
pub const ALL: [&Driver; 9] =
    [&LLVMPIPE, &GLES, &SWIFTSHADER, &COPIES, &MESA25, &MESA26, &RADV_NULL, &VALIDATION, &VALIDATION_NEW];

const MESA_VULKAN: Part =
    Part { release: Release::Stock, closure: true, packages: &["mesa-vulkan-drivers", "libvulkan1"] };
/// Its own dependencies are for a browser's windows; what is used of it needs only the C library.
const CHROMIUM: Part = Part { release: Release::Stock, closure: false, packages: &["chromium-common"] };

/// Mesa's software Vulkan driver, of the machine's own release.
pub const LLVMPIPE: Driver = Driver {
    name: "llvmpipe",
    what: "Mesa's software Vulkan driver, of this machine's release",
    parts: &[MESA_VULKAN],
    environment: |trees, environment| {
        let tree = trees.of(Release::Stock)?;
        tree.library("libvulkan.so.1")?;
        environment.add_vulkan_driver(tree.driver_manifest("llvmpipe", &tree.library(LAVAPIPE)?)?)
    },
};

/// Mesa's software OpenGL ES driver, through EGL without a display.
pub const GLES: Driver = Driver {
    name: "gles",
    what: "Mesa's software OpenGL ES driver, of this machine's release",
    parts: &[Part {
        release: Release::Stock,
        closure: true,
        packages: &["libegl1", "libegl-mesa0", "libgl1-mesa-dri", "libgles2"],
    }],
    environment: |trees, environment| {
        let tree = trees.of(Release::Stock)?;
        tree.library("libEGL.so.1")?;
        tree.library("dri/swrast_dri.so")?;
        environment.set("LIBGL_DRIVERS_PATH", tree.library("dri")?);
        environment.set("__EGL_VENDOR_LIBRARY_DIRS", tree.installed("usr/share/glvnd/egl_vendor.d")?);
        environment.set("EGL_PLATFORM", "surfaceless");
        Ok(())
    },
};

/// Another vendor's software Vulkan driver: subgroups of 4, no 16-bit or 64-bit types, offsets in multiples of 256.
pub const SWIFTSHADER: Driver = Driver {
    name: "swiftshader",
    what: "SwiftShader, a software Vulkan driver that shares no code with Mesa",
    parts: &[Part { release: Release::Stock, closure: true, packages: &["libvulkan1"] }, CHROMIUM],
    environment: |trees, environment| {
        let tree = trees.of(Release::Stock)?;
        tree.library("libvulkan.so.1")?;
        let library = tree.installed("usr/lib/chromium/libvk_swiftshader.so")?;
        environment.add_vulkan_driver(tree.driver_manifest("swiftshader", &library)?)
    },
};

/// llvmpipe four times in one instance. The loader would drop a library named twice, so each is a copy of its own;
/// the four devices have one UUID between them.
pub const COPIES: Driver = Driver {
    name: "copies",
    what: "llvmpipe four times: four physical devices that share one UUID",
    parts: &[MESA_VULKAN],
    environment: |trees, environment| {
        let tree = trees.of(Release::Stock)?;
        tree.library("libvulkan.so.1")?;
        let original = tree.library(LAVAPIPE)?;
        for n in 0..4 {
            let name = format!("llvmpipe{n}");
            let copy = tree.copy_of(&original, &format!("libvulkan_lvp{n}.so"))?;
            environment.add_vulkan_driver(tree.driver_manifest(&name, &copy)?)?;
        }
        Ok(())
    },
};

/// llvmpipe of the release after this machine's, built for this machine's: it takes a memfd for a dma-buf.
pub const MESA25: Driver = Driver {
    name: "mesa25",
    what: "llvmpipe from the backports of this machine's Debian release",
    // The older packages bring the libraries that both use.
    parts: &[
        MESA_VULKAN,
        Part {
            release: Release::Backports,
            closure: false,
            packages: &["mesa-vulkan-drivers", "libdrm2", "libdrm-amdgpu1"],
        },
    ],
    environment: |trees, environment| {
        trees.of(Release::Stock)?.library("libvulkan.so.1")?;
        let tree = trees.of(Release::Backports)?;
        environment.add_vulkan_driver(tree.driver_manifest("mesa25", &tree.library(LAVAPIPE)?)?)
    },
};

/// Debian's newest llvmpipe, which needs a newer C library than this machine may have, and so its own loader.
pub const MESA26: Driver = Driver {
    name: "mesa26",
    what: "llvmpipe from Debian sid, with a C library of its own",
    parts: &[Part { release: Release::Sid, closure: true, packages: &["mesa-vulkan-drivers", "libvulkan1"] }],
    environment: |trees, environment| {
        let tree = trees.of(Release::Sid)?;
        tree.library("libvulkan.so.1")?;
        environment.add_vulkan_driver(tree.driver_manifest("mesa26", &tree.library(LAVAPIPE)?)?)
    },
};

/// AMD's compiler without its hardware: pipelines are compiled to RDNA3 code, memory there is none.
pub const RADV_NULL: Driver = Driver {
    name: "radv-null",
    what: "RADV for a Radeon that is not there (GFX1100): it compiles pipelines and has no memory",
    parts: &[MESA_VULKAN],
    environment: |trees, environment| {
        let tree = trees.of(Release::Stock)?;
        tree.library("libvulkan.so.1")?;
        environment.set("RADV_FORCE_FAMILY", "gfx1100");
        environment.add_vulkan_driver(tree.driver_manifest("radv", &tree.library("libvulkan_radeon.so")?)?)
    },
};

/// The Khronos validation layer, switched on, with synchronisation validation within and across submissions.
pub const VALIDATION: Driver = Driver {
    name: "validation",
    what: "the Khronos validation layer of this machine's release, with synchronisation checks",
    parts: &[Part { release: Release::Stock, closure: true, packages: &["vulkan-validationlayers"] }],
    environment: |trees, environment| {
        let manifest = trees.of(Release::Stock)?.manifest(
            "usr/share/vulkan/explicit_layer.d",
            LAYER,
            &format!("lib{LAYER}.so"),
        )?;
        environment.set(
            "VK_LAYER_ENABLES",
            "VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT:\
             VALIDATION_CHECK_ENABLE_SYNCHRONIZATION_VALIDATION_QUEUE_SUBMIT",
        );
        watch(&manifest, environment)
    },
};

/// A much newer validation layer, which finds hazards of kernels only by a heuristic that is switched on here.
pub const VALIDATION_NEW: Driver = Driver {
    name: "validation-new",
    what: "the newest Khronos validation layer (1.4), with synchronisation checks and its shader heuristic",
    parts: &[CHROMIUM],
    environment: |trees, environment| {
        let tree = trees.of(Release::Stock)?;
        let library = tree.installed(&format!("usr/lib/chromium/lib{LAYER}.so"))?;
        environment.set("VK_LAYER_VALIDATE_SYNC", "1");
        environment.set("VK_LAYER_SYNCVAL_SHADER_ACCESSES_HEURISTIC", "1");
        watch(&tree.layer_manifest("validation-new", LAYER, &library)?, environment)
    },
};

const LAVAPIPE: &str = "libvulkan_lvp.so";
const LAYER: &str = "VkLayer_khronos_validation";

/// Puts the layer of this manifest between a program and its devices.
fn watch(manifest: &Path, environment: &mut Environment) -> Result<(), String> {
    let directory = manifest.parent().unwrap_or(Path::new("/"));
    // Without an action of its own, the layer prints nothing in a program that listens for messages itself.
    let settings = directory.join("vk_layer_settings.txt");
    let text = "khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG\n\
                khronos_validation.report_flags = error,warn\n";
    tree::write(&settings, text)?;
    environment.set("VK_LAYER_PATH", directory);
    environment.set("VK_LAYER_SETTINGS_PATH", settings);
    environment.set("VK_INSTANCE_LAYERS", "VK_LAYER_KHRONOS_validation");
    // The loader then names each layer it inserts, which proves that a run was watched.
    environment.set("VK_LOADER_DEBUG", "layer");
    Ok(())
}
