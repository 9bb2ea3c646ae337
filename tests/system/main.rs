//! Tests that start real processes on loopback, and checks of the repository's own files.
//!
//! They are one program, so that cargo compiles the harness once and links once. `cargo xtask test`
//! runs each module as a process of its own, under the module's name.

#[path = "../harness/mod.rs"]
mod harness;

mod autocast;
mod bad_data;
mod bad_input;
mod bad_records;
mod chaos;
mod checkpoint_faults;
mod checkpoint_s3;
mod checkpoints;
mod columns;
mod compose;
mod crashes;
mod custom_model;
mod data_files;
mod deploy;
mod device_loss;
mod evaluations;
mod full_journal;
mod hostile_scripts;
mod hosts;
mod https;
mod images;
mod known_files;
mod launch;
mod leaving;
mod master_loss;
mod matches_pytorch;
mod mnist;
mod numerics;
mod observed;
#[cfg(feature = "cuda")]
mod on_device;
mod overlap;
mod predict;
mod ps_loss;
mod restore;
mod resume;
mod same_bits;
mod scale;
mod scratch;
mod scripted;
mod scripts;
mod security;
mod shared_memory;
mod slurm;
mod soft_labels;
mod takeover;
mod tidy;
mod traced;
mod upgrade;
mod url_faults;
mod url_results;
mod urls;
mod watched;
mod worst;
