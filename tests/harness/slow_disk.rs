//! A disk on which some folders are not created until the test allows it: a library that is loaded
//! before the C library.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::skip::Lacks;

/// Source of the library. `mkdir` of a path that ends with `/NAME` waits while the file
/// `$EBB_TEST_GATES/NAME` exists. It creates `NAME.waits` beside that file when it waits.
const LIBRARY: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int mkdir(const char *path, mode_t mode) {
    int (*real)(const char *, mode_t) = (int (*)(const char *, mode_t))dlsym(RTLD_NEXT, "mkdir");
    const char *gates = getenv("EBB_TEST_GATES"), *name = strrchr(path, '/');
    if (gates && name) {
        char gate[4096], waits[4096 + 8];
        snprintf(gate, sizeof gate, "%s%s", gates, name);
        snprintf(waits, sizeof waits, "%s.waits", gate);
        while (access(gate, F_OK) == 0) {
            int file = open(waits, O_CREAT | O_WRONLY, 0600);
            if (file >= 0) close(file);
            usleep(1000);
        }
    }
    return real(path, mode);
}
"#;

/// The library, and the folders that are not created yet.
pub struct SlowDisk {
    gates: PathBuf,
    library: PathBuf,
}

impl SlowDisk {
    /// Builds the library in `folder`, so that folders with these names wait. Returns `None`
    /// without a C compiler.
    pub fn new(folder: &Path, names: &[&str]) -> Option<Self> {
        let (source, library, gates) = (folder.join("slow.c"), folder.join("slow.so"), folder.join("gates"));
        fs::write(&source, LIBRARY).expect("written");
        fs::create_dir(&gates).expect("a folder");
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .arg("-ldl")
            .output();
        match built {
            Ok(built) => assert!(built.status.success(), "{}", super::text(&built)),
            Err(error) => {
                super::skipped(Lacks::Package, &format!("no C compiler (cc) for a slow disk: {error}"));
                return None;
            }
        }
        for name in names {
            fs::write(gates.join(name), "").expect("written");
        }
        Some(Self { gates, library })
    }

    /// Returns the environment of a process that uses this disk.
    pub fn environment(&self) -> [(&str, &str); 2] {
        [
            ("LD_PRELOAD", self.library.to_str().expect("a path of ours")),
            ("EBB_TEST_GATES", self.gates.to_str().expect("a path of ours")),
        ]
    }

    /// Waits until a process waits for the folder of this name.
    pub fn wait_for(&self, name: &str) {
        while !self.gates.join(format!("{name}.waits")).exists() {
            std::thread::park_timeout(Duration::from_millis(5));
        }
    }

    /// Lets the folder of this name be created.
    pub fn open(&self, name: &str) {
        fs::remove_file(self.gates.join(name)).expect("it is closed");
    }
}
