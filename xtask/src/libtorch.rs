//! libtorch, pinned: the C++ library that `tch` links. An existing `LIBTORCH` wins; else the official wheel is fetched
//! once into a cache that clones share, and `.libtorch` in the clone points there (`.cargo/config.toml` names it).
//!
//! ```text
//! CACHE/libtorch-2.11.0-x86_64/
//!   torch/                         <- .libtorch
//!     build-version  include/
//!     lib/                         libtorch_cpu.so and what it is linked to; no libtorch_cuda.so, so nothing links it
//!     lib/libtorch_cuda_linalg.so  \
//!     cuda -> ../cuda/torch/lib     | only with --cuda; the worker loads torch/cuda/libtorch_cuda.so when it is there
//!   nvidia -> cuda/nvidia           |
//!   cuda/torch/lib/  cuda/nvidia/  /  the CUDA half, laid out as in the wheels
//! ```
//!
//! The libraries find each other by the rpaths they come with: `$ORIGIN` and `$ORIGIN/../../nvidia/*/lib`.

use crate::{
    install::install,
    pip::Pip,
    workspace::{cache_dir, libtorch_link, libtorch_of_user},
};
use anyhow::{Context, Result, bail, ensure};
use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

/// The version that `tch` in `Cargo.toml` is made for.
const VERSION: &str = "2.11.0";

/// Fetch libtorch 2.11.0 for this clone, or check the one that LIBTORCH names.
///
/// The CPU half is a download of 544 MB (aarch64: 432 MB) and takes 500 MB on disk; during the fetch 1.1 GB. A fetch
/// that was interrupted starts again. A finished one is never changed; it lies in $EBB_CACHE_DIR, else
/// $XDG_CACHE_HOME/ebbflow, else ~/.cache/ebbflow, and is shared by all clones.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Also the CUDA half: 2.5 GB to download, 3.1 GB on disk. Programs need no rebuild to use it.
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

/// Libraries of the CUDA half that libtorch_cpu.so opens by name at run time, so it looks beside itself.
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

/// The folder that `LIBTORCH` names, or that stands in the place of our link.
fn owned_by_user(link: &Path) -> Option<PathBuf> {
    libtorch_of_user().or_else(|| (link.is_dir() && !link.is_symlink()).then(|| link.to_owned()))
}

fn fetch(half: &Half, dir: &Path, finish: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let (name, place) = (half.name, dir.display());
    if dir.exists() {
        return Ok(());
    }
    let arch = std::env::consts::ARCH;
    ensure!(
        std::env::consts::OS == "linux" && ["x86_64", "aarch64"].contains(&arch),
        "no wheel is pinned for {arch} {}; unpack libtorch {VERSION} yourself and set LIBTORCH to its folder",
        std::env::consts::OS
    );
    eprintln!("libtorch {VERSION}, {name}: fetching {} into `{place}`", half.size);
    let filled = install(dir, |partial, lock| {
        let pip = Pip::find(lock.try_clone()?)?;
        for wheel in pip.download(half.requirements, partial)? {
            eprintln!("unpacking {}", wheel.file_name().unwrap_or_default().display());
            let members = pip.unpack(&wheel, partial, half.members)?;
            ensure!(members > 0, "`{}` holds nothing of the {name}: its layout has changed", wheel.display());
            fs::remove_file(&wheel)?;
        }
        fs::remove_dir(partial.join("wheels"))?;
        finish(partial)
    })
    .with_context(|| format!("install the {name} of libtorch {VERSION}"))?;
    eprintln!("libtorch {VERSION}, {name}: {}", if filled { "complete" } else { "already complete" });
    Ok(())
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
    // torch-sys asks the linker for `torch`, an empty library whose only use is to pull in libtorch_cuda.so.
    fs::write(lib.join("libtorch.so"), "/* linker script */ INPUT(libtorch_cpu.so)\n")?;
    fs::write(partial.join("torch/build-version"), format!("{VERSION}\n"))?;
    Ok(())
}

/// Lets the CPU half see the complete CUDA half; `torch/cuda`, which the worker looks for, comes last.
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

/// Checks that `torch` is a libtorch folder of our version.
fn verify(torch: &Path) -> Result<()> {
    let here = || format!("LIBTORCH=`{}` is no libtorch folder", torch.display());
    let library = torch.join("lib/libtorch_cpu.so");
    fs::metadata(&library).with_context(|| format!("find `{}`", library.display())).with_context(here)?;
    let version = version(torch).with_context(here)?;
    if version != VERSION {
        bail!(
            "LIBTORCH=`{}` is libtorch {version}, this project needs {VERSION}; unset LIBTORCH to fetch it",
            torch.display()
        );
    }
    Ok(())
}

/// The version a libtorch folder says it has, without a suffix such as `+cpu`; zip archives bring `build-version`,
/// wheels only a header.
fn version(torch: &Path) -> Result<String> {
    let file = torch.join("build-version");
    match fs::read_to_string(&file) {
        Ok(version) => return Ok(without_suffix(&version).to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error).with_context(|| format!("read `{}`", file.display())),
    }
    let header = torch.join("include/torch/headeronly/version.h");
    let text = fs::read_to_string(&header).with_context(|| format!("read `{}`", header.display()))?;
    let after = text.split_once("#define TORCH_VERSION ").map(|(_, after)| after);
    let version = after.and_then(|after| after.split('"').nth(1));
    let version = version.with_context(|| format!("no TORCH_VERSION in `{}`", header.display()))?;
    Ok(without_suffix(version).to_owned())
}

fn without_suffix(version: &str) -> &str {
    let version = version.trim();
    version.split_once('+').map_or(version, |(version, _)| version)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with the files that `verify` looks at.
    fn libtorch(header: &str) -> tempfile::TempDir {
        let torch = tempfile::tempdir().unwrap();
        fs::create_dir_all(torch.path().join("lib")).unwrap();
        fs::write(torch.path().join("lib/libtorch_cpu.so"), "").unwrap();
        fs::create_dir_all(torch.path().join("include/torch/headeronly")).unwrap();
        fs::write(torch.path().join("include/torch/headeronly/version.h"), header).unwrap();
        torch
    }

    #[test]
    fn version_is_read_from_build_version_or_from_the_header() {
        let torch = libtorch("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION \\\n  \"2.11.0\"\n");
        verify(torch.path()).unwrap();
        fs::write(torch.path().join("build-version"), "2.11.0+cpu\n").unwrap();
        verify(torch.path()).unwrap();
    }

    #[test]
    fn another_version_is_refused_with_both_numbers() {
        let torch = libtorch("#define TORCH_VERSION \"2.10.1\"");
        let error = verify(torch.path()).unwrap_err().to_string();
        assert!(error.contains("2.10.1") && error.contains(VERSION), "{error}");
    }

    #[test]
    fn folder_without_the_library_is_refused_with_its_path() {
        let torch = tempfile::tempdir().unwrap();
        let error = format!("{:#}", verify(torch.path()).unwrap_err());
        assert!(error.contains("lib/libtorch_cpu.so"), "{error}");
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
