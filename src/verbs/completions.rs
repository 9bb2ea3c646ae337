//! `ebb completions`: the completion script of a shell, for this program under the name it was called by.

use anyhow::Result;
use clap::CommandFactory as _;

use crate::app::App;
use crate::args::{self, Cli};

/// # Errors
/// Nobody reads the output.
pub(crate) fn run(args: &args::Completions, app: &App) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), app.program(), &mut script);
    app.screen.print(&String::from_utf8_lossy(&script))
}
