//! Libraries that tests of the kernels for devices build and load.
#![expect(unsafe_code, reason = "loads libraries that the tests have built or been given")]

use std::ffi::{CStr, CString, c_void};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Command;

/// Options of the compiler. They have the meaning of those that NVRTC gets: no contraction into
/// fused multiply-add, and IEEE division and square root.
const OPTIONS: [&str; 10] = [
    "-std=c++17",
    "-O2",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
];

/// Builds `folder/name` from a file of `tests/cuda/` and the text of the kernels. A compiler takes
/// ten seconds for it, so all test programs of a target folder share what was built.
///
/// # Panics
/// With what the compiler says.
pub fn build(file: &str, kernels: &str, folder: &Path, name: &str) {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    let source =
        crates.map(|folder| folder.join("kernels/tests/cuda").join(file)).find(|source| source.exists());
    let source = source.unwrap_or_else(|| panic!("no `kernels/tests/cuda/{file}`"));
    let mut key = DefaultHasher::new();
    let texts = [source.clone(), source.with_file_name("host.hpp")];
    let texts = texts.map(|text| fs::read(text).expect("a file of the tests"));
    (OPTIONS, name, kernels, texts).hash(&mut key);
    let program = std::env::current_exe().expect("the path of the test program");
    let shared = program.ancestors().nth(2).expect("the target folder").join("test-libraries");
    let shared = shared.join(format!("{:016x}", key.finish()));
    fs::create_dir_all(&shared).expect("a folder for libraries of tests");
    // One test builds, and the others wait for it.
    let lock = File::create(shared.join("lock")).expect("a file to lock");
    lock.lock().expect("a lock");
    let built = shared.join(name);
    if !built.exists() {
        fs::write(shared.join("kernels.cu"), kernels).expect("the text of the kernels");
        // Under its name only when it is whole.
        let partial = shared.join("partial");
        let mut compiler = Command::new("c++");
        compiler.args(OPTIONS).arg("-I").arg(&shared).arg(format!("-Wl,-soname,{name}"));
        compiler.arg("-o").arg(&partial).arg(source);
        let output = compiler.output().expect("a C++ compiler");
        assert!(output.status.success(), "{compiler:?}: {}", String::from_utf8_lossy(&output.stderr));
        fs::rename(partial, &built).expect("the new library");
    }
    fs::copy(built, folder.join(name)).expect("a temporary file");
}

/// Loads a library for good. Whoever loads one of its name later gets this one.
///
/// # Panics
/// With what the loader says.
pub fn load(library: &Path) -> *mut c_void {
    let path = CString::new(library.as_os_str().as_bytes()).expect("a path");
    // SAFETY: the library runs nothing of its own when it is loaded.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!handle.is_null(), "{}", said());
    handle
}

/// Returns the address of a function.
///
/// # Panics
/// If the library has none of this name.
pub fn function(library: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the handle is of a library that is never closed.
    let function = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!function.is_null(), "{}", said());
    function
}

/// Loads NVRTC from the folder `EBB_NVRTC`. Returns whether there is this folder. The loader may
/// know an NVRTC by itself.
#[expect(clippy::disallowed_methods, reason = "the check says through the environment where NVRTC lies")]
pub fn load_nvrtc() -> bool {
    let Some(folder) = std::env::var_os("EBB_NVRTC").filter(|folder| !folder.is_empty()) else {
        return false;
    };
    let files = fs::read_dir(&folder).unwrap_or_else(|error| panic!("EBB_NVRTC={folder:?}: {error}"));
    let mut files: Vec<_> = files.map(|file| file.expect("an entry").path()).collect();
    files.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with("libnvrtc") && name.contains(".so.") && !name.contains(".alt.")
    });
    // What NVRTC looks for by its name, before NVRTC: `libnvrtc-builtins` sorts first.
    files.sort();
    assert!(!files.is_empty(), "EBB_NVRTC={folder:?} has no libnvrtc.so");
    files.iter().for_each(|file| {
        load(file);
    });
    true
}

/// Returns why the loader failed.
fn said() -> String {
    // SAFETY: the loader's text lasts until this thread's next call of it.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the loader's text ends with a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
