//! `ebb completions`: the completion script of a shell, for this program under the name that the
//! user typed.

use anyhow::Result;
use clap::CommandFactory as _;

use crate::app::App;
use crate::args::{self, Cli};

/// # Errors
/// The reader of the output left.
pub(crate) fn run(args: &args::Completions, app: &App) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), app.program(), &mut script);
    app.screen.print(&String::from_utf8_lossy(&script))
}
