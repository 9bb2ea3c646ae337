//! The safe side of `shim.cpp`: a TorchScript module, and libtorch's settings. Errors are
//! libtorch's messages.
#![expect(unsafe_code, reason = "calls the C++ shim")]

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};

use proto::spec::Autocast as Type;
use tch::{Kind, Tensor};

use crate::engines::script::{Argument, Passing};

/// A C++ `at::Tensor`, called `C_tensor` in `tch`.
type RawTensor = c_void;

#[repr(C)]
struct RawScript {
    _opaque: [u8; 0],
}

#[repr(C)]
struct RawHooked {
    _opaque: [u8; 0],
}

#[repr(C)]
struct RawEvent {
    _opaque: [u8; 0],
}

// SAFETY: these are the functions of `shim.cpp`, with its types.
unsafe extern "C" {
    fn ebb_free(memory: *mut c_void);
    fn ebb_library() -> *const c_char;
    fn ebb_settings() -> *mut c_char;
    fn ebb_facts(device: i32, out: *mut *mut c_char) -> *mut c_char;
    fn ebb_tf32(allowed: bool) -> *mut c_char;
    fn ebb_autocast(device: i32, half: bool, on: bool) -> *mut c_char;
    #[cfg(test)]
    fn ebb_switches(out: *mut *mut c_char) -> *mut c_char;
    fn ebb_thread(threads: i32) -> *mut c_char;
    fn ebb_load(file: *const c_char, device: i32, out: *mut *mut RawScript) -> *mut c_char;
    fn ebb_drop(script: *mut RawScript);
    fn ebb_arguments(script: *const RawScript, out: *mut *mut c_char) -> *mut c_char;
    fn ebb_draws(script: *const RawScript) -> bool;
    fn ebb_entries(script: *const RawScript) -> usize;
    fn ebb_entry(
        script: *const RawScript,
        index: usize,
        name: *mut *const c_char,
        tensor: *mut *mut RawTensor,
        is_parameter: *mut bool,
        is_buffer: *mut bool,
        is_written: *mut bool,
    ) -> *mut c_char;
    fn ebb_forward(
        script: *mut RawScript,
        tensors: *const *const RawTensor,
        names: *const *const c_char,
        count: usize,
        how: c_int,
        labels: *const RawTensor,
        train: bool,
        loss: *mut *mut RawTensor,
        outputs: *mut *mut RawTensor,
    ) -> *mut c_char;
    fn ebb_listener(out: *mut *mut RawHooked) -> *mut c_char;
    fn ebb_unhook(hooked: *mut RawHooked);
    fn ebb_hook(hooked: *const RawHooked, leaf: *const RawTensor, number: usize) -> *mut c_char;
    fn ebb_event(device: i32, out: *mut *mut RawEvent, handle: *mut *mut c_void) -> *mut c_char;
    fn ebb_drop_event(event: *mut RawEvent);
    fn ebb_backward(
        hooked: *const RawHooked,
        loss: *const RawTensor,
        leaves: *const *const RawTensor,
        count: usize,
        made: extern "C" fn(*mut c_void, usize, *mut RawTensor) -> bool,
        context: *mut c_void,
    ) -> *mut c_char;
    fn ebb_save(script: *mut RawScript, bytes: *mut *mut c_void, length: *mut usize) -> *mut c_char;
}

/// Returns the file from which libtorch's CPU half was loaded.
pub(super) fn library() -> Option<PathBuf> {
    // SAFETY: the function gives null or a C string that lives as long as the process.
    let path = unsafe { ebb_library().as_ref().map(|path| CStr::from_ptr(path)) };
    path.map(|path| PathBuf::from(OsStr::from_bytes(path.to_bytes())))
}

/// Returns the facts, for people, that decide how libtorch rounds on a CUDA device. -1 is the CPU.
pub(super) fn facts(device: i32) -> Result<String, String> {
    let mut facts = ptr::null_mut();
    // SAFETY: takes a number; without error `facts` is a C string of ours to free.
    unsafe {
        result(ebb_facts(device, &raw mut facts))?;
        let text = CStr::from_ptr(facts).to_string_lossy().into_owned();
        ebb_free(facts.cast());
        Ok(text)
    }
}

/// Makes the settings of the process; see `ebb_settings`.
pub(super) fn settings() -> Result<(), String> {
    // SAFETY: takes nothing.
    result(unsafe { ebb_settings() })
}

/// Makes the settings of the calling thread; see `ebb_thread`.
pub(super) fn thread(threads: usize) -> Result<(), String> {
    let threads = i32::try_from(threads).map_err(|_| "too many".to_owned())?;
    // SAFETY: takes a number.
    result(unsafe { ebb_thread(threads) })
}

/// Allows or forbids TF32 for the whole process; see `ebb_tf32`.
pub(super) fn allow_tf32(allowed: bool) -> Result<(), String> {
    // SAFETY: takes a flag.
    result(unsafe { ebb_tf32(allowed) })
}

/// Returns the switches that decide how results round, by name.
#[cfg(test)]
pub(super) fn switches() -> std::collections::BTreeMap<String, bool> {
    let mut text = ptr::null_mut();
    // SAFETY: without error `text` is a C string of ours to free.
    let text = unsafe {
        result(ebb_switches(&raw mut text)).expect("libtorch tells its switches");
        let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
        ebb_free(text.cast());
        copy
    };
    let switch = |line: &str| line.rsplit_once(' ').map(|(name, value)| (name.to_owned(), value == "1"));
    text.lines().filter_map(switch).collect()
}

/// Autocast of the calling thread, until it is dropped.
#[derive(Debug)]
pub(super) struct Autocast {
    device: i32,
    autocast: Type,
    /// It is a setting of the thread.
    _here: PhantomData<*const ()>,
}

impl Autocast {
    /// Begins autocast of operations on `device`.
    pub(super) fn begin(device: tch::Device, autocast: Type) -> Result<Self, String> {
        let begun = Self { device: index(device)?, autocast, _here: PhantomData };
        begun.switch(true)?;
        Ok(begun)
    }

    fn switch(&self, on: bool) -> Result<(), String> {
        // SAFETY: takes a number and flags.
        result(unsafe { ebb_autocast(self.device, kind(self.autocast) == Kind::Half, on) })
    }
}

impl Drop for Autocast {
    fn drop(&mut self) {
        let ended = self.switch(false);
        debug_assert_eq!(ended, Ok(()));
    }
}

/// Returns libtorch's name of a type of autocast.
pub(super) const fn kind(autocast: Type) -> Kind {
    match autocast {
        Type::Bf16 => Kind::BFloat16,
        Type::F16 => Kind::Half,
    }
}

/// Returns the number of a device in the shim: -1 is the CPU.
fn index(device: tch::Device) -> Result<i32, String> {
    match device {
        tch::Device::Cuda(index) => i32::try_from(index).map_err(|_| "no such device".to_owned()),
        _ => Ok(-1),
    }
}

/// What hears of gradients: the number of the leaf, and its gradient. On a device it is called in
/// other threads, one call at a time.
type Made<'a> = dyn FnMut(usize, Tensor) + Send + 'a;

/// The leaves of one model, whose gradients are told as they are made.
#[derive(Debug)]
pub(super) struct Hooked(NonNull<RawHooked>);

// SAFETY: it is a reference-counted pointer, and what it leads to has a lock.
unsafe impl Send for Hooked {}

impl Hooked {
    /// Hooks leaves, each with its number. A leaf is hooked once in its life.
    pub(super) fn new<'a>(leaves: impl IntoIterator<Item = (usize, &'a Tensor)>) -> Result<Self, String> {
        let mut hooked = ptr::null_mut();
        // SAFETY: without error `hooked` is ours.
        result(unsafe { ebb_listener(&raw mut hooked) })?;
        let hooked = Self(NonNull::new(hooked).ok_or("libtorch gave no listener")?);
        for (number, leaf) in leaves {
            // SAFETY: both are alive.
            result(unsafe { ebb_hook(hooked.0.as_ptr(), leaf.as_ptr().cast(), number) })?;
        }
        Ok(hooked)
    }

    /// Computes the gradients of a loss for leaves. `made` gets that of each hooked leaf as soon as
    /// all that adds to it was added: on the CPU in this thread, with its values. On a device the
    /// values come later, see [`Event`]. A leaf that took no part in the loss has none.
    pub(super) fn backward(
        &self,
        loss: &Tensor,
        leaves: &[&Tensor],
        mut made: &mut Made<'_>,
    ) -> Result<(), String> {
        extern "C" fn tell(context: *mut c_void, leaf: usize, gradient: *mut RawTensor) -> bool {
            let telling = || {
                // SAFETY: `backward` waits for the call and gave `made`, which nobody else uses
                // now. The gradient is ours.
                let (made, gradient) = unsafe { (&mut *context.cast::<&mut Made<'_>>(), own(gradient)) };
                if let Some(gradient) = gradient {
                    made(leaf, gradient);
                }
            };
            // A panic must not cross C++.
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(telling)).is_ok()
        }
        let leaves: Vec<*const RawTensor> = leaves.iter().map(|leaf| leaf.as_ptr().cast()).collect();
        let (hooked, context) = (self.0.as_ptr(), (&raw mut made).cast());
        let (loss, count) = (loss.as_ptr().cast(), leaves.len());
        // SAFETY: all are alive, and nothing calls `made` after the call.
        result(unsafe { ebb_backward(hooked, loss, leaves.as_ptr(), count, tell, context) })
    }
}

impl Drop for Hooked {
    fn drop(&mut self) {
        // SAFETY: it is ours. The hooks have the listener as long as the leaves live.
        unsafe { ebb_unhook(self.0.as_ptr()) }
    }
}

/// An event on a CUDA device.
#[derive(Debug)]
pub(super) struct Event {
    event: NonNull<RawEvent>,
    handle: *mut c_void,
}

impl Event {
    /// Records an event of what this thread has told a device so far.
    pub(super) fn now(device: tch::Device) -> Result<Self, String> {
        let (mut event, mut handle) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: without error `event` is ours.
        result(unsafe { ebb_event(index(device)?, &raw mut event, &raw mut handle) })?;
        let event = NonNull::new(event).ok_or("libtorch gave no event")?;
        Ok(Self { event, handle })
    }

    /// Returns what the driver calls it: a `CUevent`, as long as this lives.
    pub(super) const fn handle(&self) -> *mut c_void {
        self.handle
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it is ours. A stream that waits for it goes on waiting.
        unsafe { ebb_drop_event(self.event.as_ptr()) }
    }
}

/// An attribute of a script that matters for training.
#[derive(Debug)]
pub(super) struct Entry {
    /// Path from the module, as in `state_dict`.
    pub(super) name: String,
    /// The module's own tensor, not a copy. `None`: an attribute of another type, which `forward`
    /// changes.
    pub(super) tensor: Option<Tensor>,
    /// Whether it is registered as a parameter.
    pub(super) is_parameter: bool,
    /// Whether it is registered as a buffer.
    pub(super) is_buffer: bool,
    /// Whether `forward` may change it.
    pub(super) is_written: bool,
}

/// A TorchScript module.
pub(super) struct Script(NonNull<RawScript>);

// SAFETY: a module holds reference-counted values and is tied to no thread; it is used through
// `&mut` or for reading.
unsafe impl Send for Script {}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Script")
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        // SAFETY: made by `ebb_load`, dropped once.
        unsafe { ebb_drop(self.0.as_ptr()) };
    }
}

impl Script {
    /// Reads a file that `torch.jit.save` wrote onto a device.
    pub(super) fn load(file: &Path, device: tch::Device) -> Result<Self, String> {
        let device = index(device)?;
        let file = CString::new(file.as_os_str().as_bytes()).map_err(|error| error.to_string())?;
        let mut script = ptr::null_mut();
        // SAFETY: `file` is a C string, and `script` is set when there is no error.
        result(unsafe { ebb_load(file.as_ptr(), device, &raw mut script) })?;
        NonNull::new(script).map(Self).ok_or_else(|| "no module".to_owned())
    }

    /// Returns the arguments of `forward`, without `self`.
    pub(super) fn arguments(&self) -> Result<Vec<Argument>, String> {
        let mut text = ptr::null_mut();
        // SAFETY: the script is alive; without error `text` is a C string of ours to free.
        let text = unsafe {
            result(ebb_arguments(self.0.as_ptr(), &raw mut text))?;
            let copy = CStr::from_ptr(text).to_string_lossy().into_owned();
            ebb_free(text.cast());
            copy
        };
        let argument = |line: &str| {
            let mut words = line.split(' ');
            let name = words.next().unwrap_or_default().to_owned();
            let (mut is_dictionary, mut is_optional) = (false, false);
            for word in words {
                is_dictionary |= word == "dictionary";
                is_optional |= word == "optional";
            }
            Argument { name, is_dictionary, is_optional }
        };
        Ok(text.lines().map(argument).collect())
    }

    /// Returns whether `forward` may draw random numbers.
    pub(super) fn draws(&self) -> bool {
        // SAFETY: the script is alive.
        unsafe { ebb_draws(self.0.as_ptr()) }
    }

    /// Returns the parameters, the buffers, and all other attributes that `forward` changes.
    pub(super) fn entries(&self) -> Result<Vec<Entry>, String> {
        // SAFETY: the script is alive.
        let count = unsafe { ebb_entries(self.0.as_ptr()) };
        (0..count).map(|index| self.entry(index)).collect()
    }

    fn entry(&self, index: usize) -> Result<Entry, String> {
        let (mut name, mut tensor) = (ptr::null(), ptr::null_mut());
        let (mut is_parameter, mut is_buffer, mut is_written) = (false, false, false);
        // SAFETY: the script is alive; without error `name` is a C string of the script's, copied
        // here, and `tensor` is null or ours.
        unsafe {
            result(ebb_entry(
                self.0.as_ptr(),
                index,
                &raw mut name,
                &raw mut tensor,
                &raw mut is_parameter,
                &raw mut is_buffer,
                &raw mut is_written,
            ))?;
            let name = CStr::from_ptr(name).to_string_lossy().into_owned();
            Ok(Entry { name, tensor: own(tensor), is_parameter, is_buffer, is_written })
        }
    }

    /// Calls `forward` with the inputs, each with its name. With labels it returns the loss as
    /// well.
    pub(super) fn forward(
        &mut self,
        inputs: &[(CString, Tensor)],
        how: Passing,
        labels: Option<&Tensor>,
        train: bool,
    ) -> Result<(Option<Tensor>, Tensor), String> {
        let (mut loss, mut outputs) = (ptr::null_mut(), ptr::null_mut());
        let labels = labels.map_or(ptr::null(), |labels| labels.as_ptr().cast());
        let names: Vec<*const c_char> = inputs.iter().map(|(name, _)| name.as_ptr()).collect();
        let tensors: Vec<*const RawTensor> =
            inputs.iter().map(|(_, tensor)| tensor.as_ptr().cast()).collect();
        // SAFETY: the script, the names and the tensors taken are alive; those given out are null
        // or ours.
        unsafe {
            result(ebb_forward(
                self.0.as_ptr(),
                tensors.as_ptr(),
                names.as_ptr(),
                inputs.len(),
                how as c_int,
                labels,
                train,
                &raw mut loss,
                &raw mut outputs,
            ))?;
            Ok((own(loss), own(outputs).ok_or_else(|| "forward gave no tensor".to_owned())?))
        }
    }

    /// Writes the module with its present weights as a file that `torch.jit.load` reads.
    pub(super) fn save(&mut self) -> Result<Vec<u8>, String> {
        let (mut bytes, mut length) = (ptr::null_mut(), 0);
        // SAFETY: the script is alive; without error `bytes` are `length` bytes of ours to free.
        unsafe {
            result(ebb_save(self.0.as_ptr(), &raw mut bytes, &raw mut length))?;
            let content = std::slice::from_raw_parts(bytes.cast::<u8>(), length).to_vec();
            ebb_free(bytes);
            Ok(content)
        }
    }
}

/// Takes over a tensor from the shim.
///
/// # Safety
/// `tensor` is null or an `at::Tensor` that nobody else deletes.
unsafe fn own(tensor: *mut RawTensor) -> Option<Tensor> {
    // SAFETY: as required of the caller; `tch` deletes it like one of its own.
    (!tensor.is_null()).then(|| unsafe { Tensor::from_ptr(tensor.cast()) })
}

/// Converts the shim's answer: null, or a message to free.
fn result(message: *mut c_char) -> Result<(), String> {
    if message.is_null() {
        return Ok(());
    }
    // SAFETY: the message is a C string that the shim made for us.
    unsafe {
        let text = CStr::from_ptr(message).to_string_lossy().into_owned();
        ebb_free(message.cast());
        Err(text)
    }
}
