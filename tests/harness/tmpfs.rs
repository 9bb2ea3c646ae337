//! A small file system in memory, so that a disk can really be full.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use super::{Lacks, skipped};

/// A mounted tmpfs. It is unmounted with its handle.
pub struct Tmpfs {
    dir: TempDir,
    filler: File,
}

impl Tmpfs {
    /// Mounts a tmpfs. Returns `None` if this user may not mount one.
    pub fn mount(size: &str) -> Option<Self> {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let options = format!("size={size}");
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(dir.path()).output();
        if !mount.is_ok_and(|output| output.status.success()) {
            skipped(Lacks::Machine, "mounting a tmpfs needs root; a disk that is really full was not tried");
            return None;
        }
        let filler = File::create(dir.path().join("filler")).expect("an empty disk takes a file");
        Some(Self { dir, filler })
    }

    /// Returns the mount point.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Fills the free space.
    pub fn fill(&mut self) {
        while self.filler.write_all(&[0; 4096]).is_ok() {}
    }

    /// Frees the space that [`fill`](Self::fill) took.
    pub fn free(&mut self) {
        self.filler.set_len(0).expect("a file can be cut on a full disk");
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // Lazily, because a process that is being killed may still hold a file.
        let _ = Command::new("umount").arg("-l").arg(self.dir.path()).status();
    }
}
