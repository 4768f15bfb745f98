//! What words on the command line mean: sizes, lists, `auto`, and the devices that ranks run on.
use crate::Failure;
use allhands::{
    DataType, Device, ReduceOp,
    devices::{self, DeviceName},
};
use std::{fmt::Display, str::FromStr, sync::Arc};

/// A list separated by commas.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct List<T>(pub Vec<T>);

/// A choice, or none: `auto`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Auto<T>(pub Option<T>);

/// Bytes: a number with K, M or G (powers of 1024) behind it, or nothing.
pub fn size(s: &str) -> Result<u64, String> {
    let wrong = || format!("{s:?} is no size; right are 4096, 64K, 1.5M, 1G");
    let (digits, unit) = match s.trim_end_matches(['B', 'b']).as_bytes() {
        [digits @ .., unit @ (b'k' | b'K' | b'm' | b'M' | b'g' | b'G')] => (digits.len(), unit.to_ascii_uppercase()),
        digits => (digits.len(), b'1'),
    };
    let unit = match unit {
        b'K' => 1u64 << 10,
        b'M' => 1 << 20,
        b'G' => 1 << 30,
        _ => 1,
    };
    let digits = &s[..digits];
    if let Ok(whole) = digits.parse::<u64>() {
        return whole.checked_mul(unit).ok_or_else(wrong);
    }
    let number: f64 = digits.parse().map_err(|_| wrong())?;
    let bytes = number * unit as f64;
    if unit > 1 && (0.0..1e18).contains(&bytes) { Ok(bytes as u64) } else { Err(wrong()) }
}

/// `auto`, or what `T` reads.
pub fn auto<T: FromStr<Err: Display>>(s: &str) -> Result<Auto<T>, String> {
    if s == "auto" { Ok(Auto(None)) } else { s.parse().map(|t| Auto(Some(t))).map_err(|e: T::Err| e.to_string()) }
}

/// A list of what `T` reads.
pub fn list<T: FromStr<Err: Display>>(s: &str) -> Result<List<T>, String> {
    s.split(',').map(|word| word.trim().parse().map_err(|e: T::Err| e.to_string())).collect::<Result<_, _>>().map(List)
}

/// Element types by allhands' names or nccl-tests'; `all` for those that can cross.
pub fn types(s: &str) -> Result<List<DataType>, String> {
    let have: Vec<DataType> = DataType::ALL.into_iter().filter(|t| allhands::supported(None, *t)).collect();
    let names: Vec<&str> = have.iter().map(|t| t.name()).collect();
    if s == "all" {
        return Ok(List(have));
    }
    let one = |word: &str| {
        let name = match word {
            "float" => "f32",
            "double" => "f64",
            "half" => "f16",
            "bfloat16" => "bf16",
            "int8" => "i8",
            "uint8" => "u8",
            "int32" => "i32",
            "uint32" => "u32",
            "int64" => "i64",
            "uint64" => "u64",
            name => name,
        };
        let found = have.iter().find(|t| t.name() == name).copied();
        found.ok_or_else(|| format!("{word:?} is no type that can cross; right are {} or all", names.join(", ")))
    };
    s.split(',').map(one).collect::<Result<_, _>>().map(List)
}

/// Reductions by allhands' names or nccl-tests'; `all` for every one.
pub fn ops(s: &str) -> Result<List<ReduceOp>, String> {
    if s == "all" {
        return Ok(List(ReduceOp::ALL.to_vec()));
    }
    let one = |word: &str| {
        let name = match word {
            "prod" => "product",
            "avg" => "average",
            name => name,
        };
        let names = || ReduceOp::ALL.map(ReduceOp::name).join(", ");
        let found = ReduceOp::ALL.into_iter().find(|op| op.name() == name);
        found.ok_or_else(|| format!("{word:?} is no reduction; right are {} or all", names()))
    };
    s.split(',').map(one).collect::<Result<_, _>>().map(List)
}

/// Whose devices ranks run on when none are named. Auto: every GPU, or the host where there is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Backend {
    Auto,
    Vulkan,
    Proxy,
    Cpu,
}

impl Backend {
    /// Its devices, at least one.
    pub fn devices(self) -> Result<Vec<DeviceName>, Failure> {
        let of = |wanted: fn(&DeviceName) -> bool, names: Vec<DeviceName>| -> Result<Vec<DeviceName>, Failure> {
            let names: Vec<DeviceName> = names.into_iter().filter(wanted).collect();
            let none = "no Vulkan driver was found; --backend cpu runs on the host";
            if names.is_empty() { Err(Failure::Run(none.into())) } else { Ok(names) }
        };
        match self {
            Backend::Cpu => Ok(vec![DeviceName::Cpu]),
            Backend::Vulkan => of(|d| matches!(d, DeviceName::Vulkan(_)), devices::every()),
            Backend::Proxy => of(|d| matches!(d, DeviceName::ProxyVulkan(_)), devices::every()),
            Backend::Auto => of(|_| true, devices::found()).or(Ok(vec![DeviceName::Cpu])),
        }
    }
}

/// Opens a device for each of `ranks` ranks, going round the list.
pub fn open(names: &[DeviceName], ranks: usize) -> Result<Vec<Arc<dyn Device>>, Failure> {
    names.iter().cycle().take(ranks).map(|name| Ok(devices::open(name)?)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_suffixes() {
        for (text, bytes) in [("0", 0), ("12", 12), ("4K", 4096), ("4k", 4096), ("1.5M", 3 << 19), ("2G", 2 << 30)] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "-1", "-1K", "1.5", "4X", "1e3", "99999999999999G", "infK"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn lists_take_names_aliases_and_all() {
        assert_eq!(types("float,i32"), Ok(List(vec![DataType::F32, DataType::I32])));
        assert!(types("all").unwrap().0.contains(&DataType::U32));
        assert!(types("f33").unwrap_err().contains("f32"));
        assert_eq!(ops("prod,avg"), Ok(List(vec![ReduceOp::Product, ReduceOp::Average])));
        assert_eq!(ops("all").unwrap().0.len(), 5);
        assert!(ops("xor").unwrap_err().contains("average"));
        assert_eq!(list::<u32>("1, 2,3"), Ok(List(vec![1, 2, 3])));
        assert!(list::<u32>("1,,2").is_err());
        assert_eq!(auto::<u32>("auto"), Ok(Auto(None)));
        assert_eq!(auto::<u32>("7"), Ok(Auto(Some(7))));
    }
}
