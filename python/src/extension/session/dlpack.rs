//! Memory that other libraries of this Python use without a copy, by the protocol DLPack.
//!
//! A *capsule* is an object of Python that lends memory once. A library that takes the memory
//! renames the capsule, and calls a function of ours when it needs the memory no more. A capsule
//! that nobody took gives the memory up itself.
//!
//! The structures are those of `dlpack.h`, in the form that PyTorch, JAX and NumPy have read from
//! its first version on. <https://dmlc.github.io/dlpack/latest/python_spec.html>
#![expect(unsafe_code, reason = "DLPack is an interface of C")]

use std::ffi::{CStr, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

/// Name of a capsule whose memory nobody has taken.
const NAME: &CStr = c"dltensor";

/// A device: its kind, and its number in this process.
pub(super) type Device = (i32, i32);

/// The kind of the host.
pub(super) const CPU: i32 = 1;

/// The kind of CUDA devices.
pub(super) const CUDA: i32 = 2;

/// Memory with elements of one type, row-major and without gaps.
pub(super) struct Memory<'a> {
    /// Where it begins, as its device sees it.
    pub(super) address: usize,
    pub(super) device: Device,
    pub(super) shape: &'a [usize],
    /// Type of the elements, as NumPy writes it.
    pub(super) elements: &'static str,
}

/// `DLDataType`.
#[repr(C)]
struct Elements {
    kind: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: [i32; 2],
    dimensions: i32,
    elements: Elements,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// What a capsule points to: the structure of the protocol, and behind it what that points to.
#[repr(C)]
struct Lent<O> {
    managed: Managed,
    /// The shape, and the strides behind it.
    sizes: Box<[i64]>,
    /// Keeps the memory.
    _owner: O,
}

/// Returns a capsule that lends memory, and keeps `owner` until nobody needs the memory. The last
/// one may be any thread, with the GIL or without it.
///
/// # Errors
/// Python has no memory for the capsule.
pub(super) fn capsule<O: Send + 'static>(
    py: Python<'_>,
    memory: &Memory<'_>,
    owner: O,
) -> PyResult<Py<PyAny>> {
    let shape = memory.shape.iter().map(|&size| size as i64);
    let strides = (1..=memory.shape.len()).map(|at| memory.shape[at..].iter().product::<usize>() as i64);
    let sizes: Box<[i64]> = shape.chain(strides).collect();
    let tensor = Tensor {
        data: std::ptr::with_exposed_provenance_mut(memory.address),
        device: memory.device.into(),
        dimensions: memory.shape.len() as i32,
        elements: elements(memory.elements),
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let managed = Managed { tensor, context: std::ptr::null_mut(), deleter: Some(give_up::<O>) };
    let lent = Box::into_raw(Box::new(Lent { managed, sizes, _owner: owner }));
    // SAFETY: nobody else knows of it yet. The sizes stay where they are until it is dropped.
    unsafe {
        let sizes = (*lent).sizes.as_mut_ptr();
        (*lent).managed.tensor.shape = sizes;
        (*lent).managed.tensor.strides = sizes.add(memory.shape.len());
    }
    // SAFETY: the GIL is held, and the name lives as long as the program.
    let made = unsafe {
        let capsule = ffi::PyCapsule_New(lent.cast(), NAME.as_ptr(), Some(forget));
        Bound::from_owned_ptr_or_err(py, capsule)
    };
    // SAFETY: no capsule has it.
    made.map(Bound::unbind).inspect_err(|_| unsafe { give_up::<O>(lent.cast()) })
}

/// Returns a type of NumPy, such as `<f4`, as DLPack writes it.
fn elements(numpy: &str) -> Elements {
    let [_, kind, size] = numpy.as_bytes() else { unreachable!("a type of NumPy has three letters") };
    let kind = match kind {
        b'i' => 0,
        b'u' => 1,
        b'f' => 2,
        b'b' => 6,
        _ => unreachable!("`{numpy}` is no type of an element"),
    };
    Elements { kind, bits: (size - b'0') * 8, lanes: 1 }
}

/// Gives up memory that was lent.
///
/// # Safety
/// The pointer is that of a [`Lent`] with this owner, which nobody uses afterwards.
unsafe extern "C" fn give_up<O>(managed: *mut Managed) {
    // SAFETY: the caller's promise. The structure of the protocol is at its beginning.
    drop(unsafe { Box::from_raw(managed.cast::<Lent<O>>()) });
}

/// Ends a capsule.
///
/// # Safety
/// Python calls it for a capsule of [`capsule`], with the GIL.
unsafe extern "C" fn forget(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule of this name has the structure, and nobody has taken it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast::<Managed>();
            if let Some(deleter) = (*managed).deleter {
                deleter(managed);
            }
        }
    }
}
