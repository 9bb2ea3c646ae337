//! Warnings of the worker and of its model, on their way to the logger `ebbflow` of Python.

use std::fmt::{Debug, Write as _};
use std::sync::mpsc::{Sender, channel};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

/// Gives warnings of the worker and of its model to Python from now on. Only the first call of a
/// process counts.
///
/// A thread of its own waits for the GIL, so that no thread of the worker does.
pub(super) fn forward() {
    let (send, texts) = channel();
    let subscriber = tracing_subscriber::registry().with(Forward(send));
    if tracing::subscriber::set_global_default(subscriber).is_ok() {
        std::thread::spawn(move || texts.iter().for_each(|text: String| super::log(&text)));
    }
}

struct Forward(Sender<String>);

impl<S: Subscriber> Layer<S> for Forward {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let of = event.metadata();
        let is_ours = ["worker", "_native"].contains(&of.target().split("::").next().unwrap_or_default());
        if *of.level() <= Level::WARN && is_ours {
            let mut line = Line::default();
            event.record(&mut line);
            // The thread ends with the process.
            let _ = self.0.send(format!("{}{}", line.message, line.fields));
        }
    }
}

/// The text of an event: its message, and its fields behind it.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let written = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, "; {name}: {value:?}"),
        };
        written.expect("a string takes all text");
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }
}
