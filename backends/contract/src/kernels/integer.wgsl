// An accumulator is an integer as wide as a word, or two. Narrower elements wrap when they are stored.

fn sum(a: UNSIGNED, b: UNSIGNED) -> UNSIGNED { return a + b; }
fn product(a: UNSIGNED, b: UNSIGNED) -> UNSIGNED { return a * b; }
fn least(a: UNSIGNED, b: UNSIGNED) -> UNSIGNED { return select(b, a, bitcast<ORDERED>(a) <= bitcast<ORDERED>(b)); }
fn greatest(a: UNSIGNED, b: UNSIGNED) -> UNSIGNED { return select(b, a, bitcast<ORDERED>(a) >= bitcast<ORDERED>(b)); }
fn finish(a: UNSIGNED) -> UNSIGNED { return a; }
