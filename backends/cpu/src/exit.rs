//! The process's end.

unsafe extern "C" {
    safe fn atexit(handler: extern "C" fn()) -> std::ffi::c_int;
}

/// Has `exit`, by which a process also ends when `main` returns, call `handler` before all that was registered
/// earlier. Threads still run then.
pub fn at_exit(handler: extern "C" fn()) {
    if atexit(handler) != 0 {
        log::warn!("there is no memory for a handler of the process's end");
    }
}
