// stores[i] = finish(fold(sources[0][i], sources[1][i], ...)). A turn of the loop takes the elements of one word, or
// one element of several.

struct Params {
    turns: u32,
    stride: u32,
    elements: u32,
    zero: u32,
    reciprocal: vec2<u32>,
    store: array<u32, 4>,
    source: array<u32, 8>,
    scale: array<u32, 8>,
}
var<immediate> params: Params;

@group(0) @binding(0) var<storage, read_write> words0: array<u32>;
@group(0) @binding(1) var<storage, read_write> words1: array<u32>;
@group(0) @binding(2) var<storage, read_write> words2: array<u32>;
@group(0) @binding(3) var<storage, read_write> words3: array<u32>;

@compute @workgroup_size(WORKGROUP)
fn reduce(@builtin(global_invocation_id) id: vec3<u32>) {
    for (var i = id.x; i < params.turns; i += params.stride) {
BODY
    }
}
