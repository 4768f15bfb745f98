// stores[i] = finish(fold(sources[0][i], sources[1][i], ...)). An element is one 32-bit word.

struct Params {
    count: u32,
    stride: u32,
    reciprocal: u32,
    store: array<u32, 4>,
    source: array<u32, 8>,
}
var<immediate> params: Params;

@group(0) @binding(0) var<storage, read_write> words0: array<u32>;
@group(0) @binding(1) var<storage, read_write> words1: array<u32>;
@group(0) @binding(2) var<storage, read_write> words2: array<u32>;
@group(0) @binding(3) var<storage, read_write> words3: array<u32>;

@compute @workgroup_size(WORKGROUP)
fn reduce(@builtin(global_invocation_id) id: vec3<u32>) {
    for (var i = id.x; i < params.count; i += params.stride) {
BODY
    }
}
