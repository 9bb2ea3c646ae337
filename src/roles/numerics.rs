//! `--numerics portable`: restricts libtorch to instructions that every machine with AVX2 has.
//!
//! The libraries read these variables at their start, some while the program is loaded. So the
//! program starts itself again with them. This costs one more load of libtorch, and works with any
//! version.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::args::{self, Cli, Instructions};
use crate::config::{self, Environment};
use crate::settings::Settings;
use crate::settings::roles::PORTABLE;

/// The variables of ATen, oneDNN and MKL, which are below libtorch.
const HELD: [(&str, &str); 3] =
    [("ATEN_CPU_CAPABILITY", "avx2"), ("ONEDNN_MAX_CPU_ISA", "AVX2"), ("MKL_CBWR", "AVX2")];

/// Starts this program again with the variables that `cli` asks for. Returns if they are set, or if
/// none are asked for. Call it before the process has threads.
///
/// # Errors
/// The program cannot be started again.
pub(crate) fn hold(cli: &Cli, environment: &Environment) -> io::Result<()> {
    let portable = match &cli.command {
        // The role itself reports wrong settings.
        args::Command::Worker(flags) => {
            Settings::of(flags, environment).is_ok_and(|settings| settings.text("numerics") == Some(PORTABLE))
        }
        args::Command::Run(run) => run.compute.numerics == Instructions::Portable,
        args::Command::Evaluate(evaluate) => evaluate.measure.compute.numerics == Instructions::Portable,
        args::Command::Predict(predict) => predict.measure.compute.numerics == Instructions::Portable,
        _ => false,
    };
    if !portable || HELD.iter().all(|(name, value)| config::is(name, value)) {
        return Ok(());
    }
    let mut arguments = std::env::args_os();
    let mut again = Command::new(std::env::current_exe()?);
    if let Some(name) = arguments.next() {
        again.arg0(name);
    }
    Err(again.args(arguments).envs(HELD).exec())
}
