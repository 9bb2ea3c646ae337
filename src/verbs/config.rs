//! `ebb config show`: every setting of a role with its value, unit and origin.

use anyhow::Result;
use serde_json::{Value, json};

use crate::app::App;
use crate::args;
use crate::settings::{Row, Settings};

/// # Errors
/// The settings are wrong, with the message of the role itself.
pub(crate) fn run(args: args::Config, app: &App) -> Result<()> {
    let args::Config::Show { role } = args;
    let (settings, json) = match role {
        args::ShowRole::Master(args) => (Settings::of(&args.flags, &app.environment)?, args.json),
        args::ShowRole::Ps(args) => (Settings::of(&args.flags, &app.environment)?, args.json),
        args::ShowRole::Worker(args) => (Settings::of(&args.flags, &app.environment)?, args.json),
    };
    app.screen.print(&if json { as_json(&settings).to_string() } else { table(&settings) })
}

fn as_json(settings: &Settings) -> Value {
    let row = |row: &Row| {
        json!({
            "setting": row.setting.key,
            "value": row.value,
            "unit": row.unit(),
            "origin": row.origin.name(),
            "from": row.origin.place(),
        })
    };
    json!({ "role": settings.role, "settings": settings.rows.iter().map(row).collect::<Vec<_>>() })
}

fn table(settings: &Settings) -> String {
    let cells = |row: &Row| {
        let value = row.shown().unwrap_or_else(|| "-".to_owned());
        [row.setting.key.to_owned(), value, row.unit().to_owned(), row.origin.to_string()]
    };
    let head = ["setting", "value", "unit", "origin"].map(str::to_owned);
    let lines: Vec<_> = std::iter::once(head).chain(settings.rows.iter().map(cells)).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or_default();
    let widths = [0, 1, 2].map(width);
    let line = |[key, value, unit, origin]: &[String; 4]| {
        let [first, second, third] = widths;
        format!("{key:first$}  {value:second$}  {unit:third$}  {origin}")
    };
    lines.iter().map(line).collect::<Vec<_>>().join("\n")
}
