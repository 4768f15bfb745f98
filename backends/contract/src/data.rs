//! Element types and reductions, and their exact meaning.
//!
//! **Results.** A fold takes its sources in order and rounds once. Float sum, product and average accumulate in f32
//! (f64 for f64); average multiplies the sum by the accumulator's nearest `1/n`. Integers wrap; integer average
//! sums in 64 bits, wrapping, and truncates towards zero. Min and max propagate NaN and order -0 below +0. Every
//! NaN result is the canonical quiet NaN. So a result is the same bits whichever device made it.

/// The type of an element.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum DataType {
    /// IEEE binary32.
    F32,
    /// Two's complement, 32 bits.
    I32,
    /// Unsigned, 32 bits.
    U32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// IEEE binary64.
    F64,
    /// Two's complement, 8 bits.
    I8,
    /// Unsigned, 8 bits.
    U8,
    /// Two's complement, 64 bits.
    I64,
    /// Unsigned, 64 bits.
    U64,
}

impl DataType {
    /// Every type, in the order in which tables list them.
    pub const ALL: [DataType; 10] = {
        use DataType::*;
        [F32, F16, Bf16, F64, I8, U8, I32, U32, I64, U64]
    };
    /// Bytes of an element.
    pub const fn size(self) -> u64 {
        use DataType::*;
        match self {
            I8 | U8 => 1,
            F16 | Bf16 => 2,
            F32 | I32 | U32 => 4,
            F64 | I64 | U64 => 8,
        }
    }
    /// The name on the command line and in tables.
    pub const fn name(self) -> &'static str {
        use DataType::*;
        match self {
            F32 => "f32",
            F16 => "f16",
            Bf16 => "bf16",
            F64 => "f64",
            I8 => "i8",
            U8 => "u8",
            I32 => "i32",
            U32 => "u32",
            I64 => "i64",
            U64 => "u64",
        }
    }
    /// Whether it is a floating-point type.
    pub const fn is_float(self) -> bool {
        use DataType::*;
        matches!(self, F32 | F16 | Bf16 | F64)
    }
}

impl std::fmt::Display for DataType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// How contributions become one value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum ReduceOp {
    /// x0 + x1 + ...
    Sum,
    /// x0 * x1 * ...
    Product,
    /// The least; NaN if there is one.
    Min,
    /// The greatest; NaN if there is one.
    Max,
    /// The sum divided by the number of ranks.
    Average,
}

impl ReduceOp {
    /// Every operation, in the order in which tables list them.
    pub const ALL: [ReduceOp; 5] = {
        use ReduceOp::*;
        [Sum, Product, Min, Max, Average]
    };
    /// The name on the command line and in tables.
    pub const fn name(self) -> &'static str {
        use ReduceOp::*;
        match self {
            Sum => "sum",
            Product => "product",
            Min => "min",
            Max => "max",
            Average => "average",
        }
    }
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// A Rust type that is the element of a buffer.
pub trait Element: bytemuck::Pod + PartialEq + std::fmt::Debug + Send + Sync {
    /// Its name on a device.
    const TYPE: DataType;
}

macro_rules! elements {
    ($($rust:ty = $name:ident),*) => {$(impl Element for $rust { const TYPE: DataType = DataType::$name; })*};
}
elements!(half::f16 = F16, half::bf16 = Bf16);
elements!(f32 = F32, i32 = I32, u32 = U32, f64 = F64, i8 = I8, u8 = U8, i64 = I64, u64 = U64);
