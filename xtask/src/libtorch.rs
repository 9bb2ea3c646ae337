//! libtorch, pinned: the C++ library that `tch` links. An existing `LIBTORCH` wins; else the
//! official wheel is fetched once into a cache that clones share, and `.libtorch` in the clone
//! points there (`.cargo/config.toml` names it).
//!
//! ```text
//! CACHE/libtorch-2.11.0-x86_64/
//!   torch/                         <- .libtorch
//!     build-version  include/
//!     lib/                         libtorch_cpu.so and what it is linked to; no libtorch_cuda.so,
//!                                  so nothing links it
//!     lib/libtorch_cuda_linalg.so  \
//!     cuda -> ../cuda/torch/lib     | only with --cuda; the worker loads
//!                                   | torch/cuda/libtorch_cuda.so when it is there
//!   nvidia -> cuda/nvidia           |
//!   cuda/torch/lib/  cuda/nvidia/  /  the CUDA half, laid out as in the wheels
//! ```
//!
//! The libraries find each other by the rpaths they come with: `$ORIGIN` and
//! `$ORIGIN/../../nvidia/*/lib`.

use crate::{
    install::{install, pip, run as succeed},
    workspace::{cache_dir, libtorch_link, libtorch_of_user},
};
use anyhow::{Context, Result, ensure};
use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

/// The version that `tch` in `Cargo.toml` is made for.
const VERSION: &str = "2.11.0";

/// Fetch libtorch 2.11.0 for this clone, or check the one that LIBTORCH names.
///
/// The CPU half is a download of 544 MB (aarch64: 432 MB) and takes 500 MB on disk; during the
/// fetch 1.1 GB. A fetch that was interrupted starts again. A finished one is never changed; it
/// lies in $EBB_CACHE_DIR, else $XDG_CACHE_HOME/ebbflow, else ~/.cache/ebbflow, and is shared by
/// all clones.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Fetch the CUDA half too: 2.5 GB to download, 3.1 GB on disk. No program needs a rebuild.
    #[arg(long)]
    cuda: bool,
}

/// What is taken from which wheels.
struct Half {
    name: &'static str,
    size: &'static str,
    requirements: &'static str,
    members: &'static [&'static str],
}

const CPU: Half = Half {
    name: "CPU half",
    size: "about 0.5 GB",
    requirements: include_str!("../libtorch-cpu.txt"),
    members: &[
        "torch/include/*",
        "torch/lib/*.so*",
        "!torch/lib/*cuda*",
        "!torch/lib/*nvrtc*",
        "!torch/lib/*nvshmem*",
        "!torch/lib/*python*",
        "!torch/lib/libshm*",
        "!torch/lib/libtorch_global_deps.so",
        // It is linked to libtorch_cuda.so; see `finish_cpu`.
        "!torch/lib/libtorch.so",
        "nvidia/*/lib/libcudart.so.*",
        "nvidia/*/lib/libcupti.so.*",
        "*.dist-info/licenses/*",
    ],
};

const CUDA: Half = Half {
    name: "CUDA half",
    size: "about 2.5 GB",
    requirements: include_str!("../libtorch-cuda.txt"),
    members: &[
        "torch/lib/*cuda*.so",
        "torch/lib/*nvrtc*.so",
        "torch/lib/*nvshmem*.so",
        "nvidia/*/lib/*.so*",
        "*.dist-info/licenses/*",
    ],
};

/// What pip is asked for, by any Python 3. The hashes of a requirement file pin the wheels. All
/// their tags are named because pip widens none of them: a wheel may say `manylinux_2_17` or
/// `manylinux2014` for the same thing.
const DOWNLOAD: &str = "download --no-deps --only-binary=:all: --implementation=cp --python-version=3.11 --abi=cp311 --abi=none --require-hashes";
const PLATFORMS: &str = "_2_28 _2_27 _2_25 _2_24 _2_18 _2_17 2014";

/// Arguments: a wheel, a folder, patterns. Unpacks a member when a pattern matches it and none with
/// a `!` does; `*` also matches `/`.
const UNPACK: &str = r#"
import fnmatch, sys, zipfile
wheel, folder, *patterns = sys.argv[1:]
matches = lambda member, mark: any(fnmatch.fnmatchcase(mark + member, pattern) for pattern in patterns)
with zipfile.ZipFile(wheel) as archive:
    members = [member for member in archive.namelist() if matches(member, "") and not matches(member, "!")]
    archive.extractall(folder, members)
sys.exit(None if members else f"{wheel} has nothing of it: its layout has changed")
"#;

/// Libraries of the CUDA half that libtorch_cpu.so opens by name at run time, so it looks beside
/// itself.
const OPENED_BY_NAME: [&str; 2] = ["libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so"];

pub(crate) fn run(args: &Args) -> Result<()> {
    let link = libtorch_link();
    if let Some(own) = owned_by_user(&link) {
        verify(&own)?;
        ensure!(
            !args.cuda,
            "--cuda adds to a fetched libtorch, but `{}` is yours: add it there",
            own.display()
        );
        println!("libtorch {VERSION}: using yours, `{}`", own.display());
        return Ok(());
    }
    let home = cache_dir()?.join(format!("libtorch-{VERSION}-{}", std::env::consts::ARCH));
    fetch(&CPU, &home, finish_cpu)?;
    if args.cuda {
        fetch(&CUDA, &home.join("cuda"), |_| Ok(()))?;
        link_cuda(&home)?;
    }
    let torch = home.join("torch");
    verify(&torch)?;
    point(&link, &torch)?;
    println!("libtorch {VERSION}: `{}` -> `{}`", link.display(), torch.display());
    Ok(())
}

/// Makes sure that cargo will find libtorch, fetching it if need be.
pub(crate) fn ensure_installed() -> Result<()> {
    if libtorch_of_user().is_none() && verify(&libtorch_link()).is_ok() {
        return Ok(());
    }
    run(&Args { cuda: false })
}

/// Makes sure that a program finds the CUDA half of libtorch, fetching it if need be. A libtorch of
/// the user's has it, or has not.
pub(crate) fn ensure_cuda() -> Result<()> {
    let cuda = owned_by_user(&libtorch_link()).is_none();
    run(&Args { cuda })
}

/// Returns the folder that `LIBTORCH` names, or that stands in the place of our link.
fn owned_by_user(link: &Path) -> Option<PathBuf> {
    libtorch_of_user().or_else(|| (link.is_dir() && !link.is_symlink()).then(|| link.to_owned()))
}

fn fetch(half: &Half, dir: &Path, finish: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let (name, arch, os) = (half.name, std::env::consts::ARCH, std::env::consts::OS);
    if dir.exists() {
        return Ok(());
    }
    ensure!(
        os == "linux" && ["x86_64", "aarch64"].contains(&arch),
        "no wheel is pinned for {arch} {os}; unpack libtorch {VERSION} yourself and set LIBTORCH to its folder"
    );
    eprintln!("libtorch {VERSION}, {name}: fetching {} into `{}`", half.size, dir.display());
    install(dir, |partial| {
        fill(half, partial, &[])?;
        finish(partial)
    })
    .with_context(|| {
        format!("install the {name}; without network, unpack libtorch {VERSION} yourself and set LIBTORCH to its folder")
    })
}

/// Downloads the wheels of a half, by pip with `more` arguments, and unpacks its members into
/// `dir`.
fn fill(half: &Half, dir: &Path, more: &[&str]) -> Result<()> {
    let (list, wheels) = (dir.join("requirements.txt"), dir.join("wheels"));
    fs::write(&list, half.requirements)?;
    let platform = |tag| format!("--platform=manylinux{tag}_{}", std::env::consts::ARCH);
    let mut args: Vec<_> = DOWNLOAD.split(' ').map(str::to_owned).collect();
    args.extend(PLATFORMS.split(' ').map(platform));
    args.extend([format!("--requirement={}", list.display()), format!("--dest={}", wheels.display())]);
    pip(dir, args.iter().map(String::as_str).chain(more.iter().copied()))?;
    for wheel in fs::read_dir(&wheels)? {
        let wheel = wheel?.path();
        let mut unpack = Command::new("python3");
        succeed(unpack.args(["-c", UNPACK]).args([wheel.as_path(), dir]).args(half.members))?;
    }
    Ok(fs::remove_dir_all(wheels)?)
}

/// Turns the wheels' layout into the one `torch-sys` expects.
fn finish_cpu(partial: &Path) -> Result<()> {
    let lib = partial.join("torch/lib");
    for toolkit in fs::read_dir(partial.join("nvidia"))? {
        for library in fs::read_dir(toolkit?.path().join("lib"))? {
            let library = library?;
            fs::rename(library.path(), lib.join(library.file_name()))?;
        }
    }
    fs::remove_dir_all(partial.join("nvidia"))?;
    // torch-sys asks the linker for `torch`, an empty library whose only use is to pull in
    // libtorch_cuda.so.
    fs::write(lib.join("libtorch.so"), "/* linker script */ INPUT(libtorch_cpu.so)\n")?;
    fs::write(partial.join("torch/build-version"), format!("{VERSION}\n"))?;
    Ok(())
}

/// Lets the CPU half see the complete CUDA half; `torch/cuda`, which the worker looks for, comes
/// last.
fn link_cuda(home: &Path) -> Result<()> {
    point(&home.join("nvidia"), Path::new("cuda/nvidia"))?;
    for name in OPENED_BY_NAME {
        point(&home.join("torch/lib").join(name), &Path::new("../../cuda/torch/lib").join(name))?;
    }
    point(&home.join("torch/cuda"), Path::new("../cuda/torch/lib"))
}

/// Makes the symbolic link `link` point to `target`, in one step even where it pointed elsewhere.
fn point(link: &Path, target: &Path) -> Result<()> {
    if fs::read_link(link).is_ok_and(|now| now == target) {
        return Ok(());
    }
    let temporary = link.with_added_extension(std::process::id().to_string());
    symlink(target, &temporary)
        .and_then(|()| fs::rename(&temporary, link))
        .with_context(|| format!("link `{}` to `{}`", link.display(), target.display()))
}

/// Checks that `torch` is a libtorch folder of our version. Zip archives say theirs in
/// `build-version`, wheels in a header.
fn verify(torch: &Path) -> Result<()> {
    let here = torch.display();
    let library = torch.join("lib/libtorch_cpu.so");
    ensure!(library.exists(), "LIBTORCH=`{here}` is no libtorch folder: there is no `{}`", library.display());
    let said = fs::read_to_string(torch.join("build-version"))
        .or_else(|_| fs::read_to_string(torch.join("include/torch/headeronly/version.h")))
        .with_context(|| format!("LIBTORCH=`{here}` does not say its version"))?;
    let said = said
        .split_once("#define TORCH_VERSION ")
        .and_then(|(_, after)| after.split('"').nth(1))
        .unwrap_or(&said);
    let version = said.trim().split('+').next().unwrap_or_default();
    ensure!(
        version == VERSION,
        "LIBTORCH=`{here}` is libtorch {version}, this project needs {VERSION}; unset LIBTORCH to fetch it"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::install::tests::fake_wheel;

    #[test]
    fn a_folder_needs_the_library_and_our_version() {
        let torch = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = torch.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let refused = || verify(torch.path()).unwrap_err().to_string();
        assert!(refused().contains("lib/libtorch_cpu.so"), "{}", refused());
        put("lib/libtorch_cpu.so", "");
        let header = "include/torch/headeronly/version.h";
        put(header, "#define TORCH_VERSION \"2.10.1\"");
        assert!(refused().contains("2.10.1") && refused().contains(VERSION), "{}", refused());
        put(header, "#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION \\\n  \"2.11.0\"\n");
        verify(torch.path()).unwrap();
        put("build-version", "2.11.0+cpu\n");
        verify(torch.path()).unwrap();
    }

    #[test]
    fn wanted_members_of_pinned_wheels_are_unpacked_and_other_wheels_refused() {
        let (index, dir) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (wheel, hash, find) = fake_wheel(index.path());
        let half = |hash: &str| {
            let requirements = format!("fake==1.0 --hash=sha256:{hash}").leak();
            Half { name: "", size: "", requirements, members: &["torch/lib/*", "!*cuda*"] }
        };
        let more = ["--no-index", &find, "--quiet"];
        assert!(fill(&half(&"0".repeat(64)), dir.path(), &more).is_err());
        fill(&half(&hash), dir.path(), &more).unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("torch/lib/libtorch_cpu.so")).unwrap(), "cpu");
        assert!(
            !dir.path().join("torch/lib/libtorch_cuda.so").exists() && !dir.path().join("torch/nn").exists()
        );

        let lost = Half { members: &["lost/*"], ..half(&hash) };
        let error = fill(&lost, dir.path(), &more).unwrap_err().to_string();
        assert!(error.contains(&*wheel.file_name().unwrap().to_string_lossy()), "{error}");
    }

    #[test]
    fn cpu_half_gets_no_library_that_links_cuda_and_the_two_it_needs() {
        let partial = tempfile::tempdir().unwrap();
        let (lib, nvidia) = (partial.path().join("torch/lib"), partial.path().join("nvidia/cu13/lib"));
        fs::create_dir_all(&lib).unwrap();
        fs::create_dir_all(&nvidia).unwrap();
        fs::write(nvidia.join("libcudart.so.13"), "").unwrap();
        finish_cpu(partial.path()).unwrap();
        assert!(lib.join("libcudart.so.13").exists());
        assert!(fs::read_to_string(lib.join("libtorch.so")).unwrap().contains("INPUT(libtorch_cpu.so)"));
        assert!(!partial.path().join("nvidia").exists());
    }

    #[test]
    fn cuda_half_is_seen_from_the_cpu_half_and_linking_again_changes_nothing() {
        let home = tempfile::tempdir().unwrap();
        let lib = home.path().join("cuda/torch/lib");
        fs::create_dir_all(&lib).unwrap();
        fs::create_dir_all(home.path().join("cuda/nvidia/cu13/lib")).unwrap();
        fs::create_dir_all(home.path().join("torch/lib")).unwrap();
        for name in ["libtorch_cuda.so", OPENED_BY_NAME[0], OPENED_BY_NAME[1]] {
            fs::write(lib.join(name), name).unwrap();
        }
        for _ in 0..2 {
            link_cuda(home.path()).unwrap();
            assert!(home.path().join("torch/cuda/libtorch_cuda.so").exists());
            assert!(home.path().join("torch/lib").join(OPENED_BY_NAME[0]).exists());
            // As the loader resolves $ORIGIN/../../nvidia, from either place.
            assert!(home.path().join("torch/lib/../../nvidia/cu13/lib").exists());
            assert!(home.path().join("torch/cuda/../../nvidia/cu13/lib").exists());
            assert!(!home.path().join("torch/lib/libtorch_cuda.so").exists());
        }
    }
}
