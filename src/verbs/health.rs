//! `ebb health`: asks one process by the gRPC health protocol, for supervisors and load balancers.

use anyhow::{Context as _, Result, anyhow, bail};
use net::channel::Purpose;
use net::health::{LIVE, READY};
use net::security::{Keys, Options};
use serde_json::json;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::app::App;
use crate::args;

/// Returns true if the process is alive, or with `--ready` ready.
///
/// # Errors
/// The process does not answer in time, or answers something else than health.
pub(crate) async fn run(args: args::Health, app: &App) -> Result<bool> {
    // Health needs no token, so a probe sends none.
    let files = Options { token: None, ..args.keys.over(&app.environment.keys) };
    let keys = Keys::load(files)?;
    let url = app.environment.health(args.url.as_deref(), &keys);
    // A worker shows its health without certificates, even if it has some.
    let keys = if url.starts_with("http://") { Keys::default() } else { keys };
    let channel = app.dialer.clone().with(keys).channel(&url, Purpose::Control);
    let channel = channel.map_err(|failure| anyhow!("{failure}"))?;
    let service = if args.ready { READY } else { LIVE };
    let request = HealthCheckRequest { service: service.to_owned() };
    let mut client = HealthClient::new(channel);
    let answer = tokio::time::timeout(args.timeout, client.check(request)).await;
    let answer = answer.map_err(|_| anyhow!("no answer within {:?}", args.timeout));
    let answer = answer.with_context(|| format!("no health from {url}"))?;
    let is_so = match answer {
        Ok(answer) => answer.into_inner().status() == ServingStatus::Serving,
        // It answers, and does not know yet.
        Err(status) if status.code() == Code::NotFound => false,
        Err(status) => bail!("no health from {url}: {}", client::failure(status)),
    };
    let state = match (args.ready, is_so) {
        (true, true) => "ready",
        (false, true) => "alive",
        (true, false) => "not ready",
        (false, false) => "not alive",
    };
    let facts = json!({ "url": url, "status": state });
    app.screen.print(&if args.json { facts.to_string() } else { format!("{url} is {state}") })?;
    Ok(is_so)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use client::pipe::Network;

    use super::*;
    use crate::fake::{Fake, app};

    fn ask(ready: bool) -> args::Health {
        args::Health {
            url: None,
            ready,
            timeout: Duration::from_secs(120),
            json: false,
            keys: args::KeyFiles::default(),
        }
    }

    #[tokio::test]
    async fn alive_and_ready_are_two_questions() {
        let network = Network::new();
        let (reporter, service) = tonic_health::server::health_reporter();
        let incoming = network.listen("127.0.0.1").unwrap();
        tokio::spawn(net::channel::server().add_service(service).serve_with_incoming(incoming));
        let app = app(&network);
        // Nobody has said yet whether it is ready.
        assert!(run(ask(false), &app).await.unwrap());
        assert!(!run(ask(true), &app).await.unwrap());
        net::health::set_ready(&reporter, true).await;
        assert!(run(ask(true), &app).await.unwrap());
        net::health::set_ready(&reporter, false).await;
        assert!(!run(ask(true), &app).await.unwrap());
        let json = args::Health { json: true, ..ask(true) };
        assert!(!run(json, &app).await.unwrap());
        let facts = app.facts();
        let last = facts.lines().last().unwrap();
        assert_eq!(last, r#"{"url":"http://127.0.0.1:4700","status":"not ready"}"#);
        assert!(facts.starts_with("http://127.0.0.1:4700 is alive\n"), "{facts}");
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_there_and_somebody_else_are_errors_that_name_the_url() {
        let nobody = app(&Network::new());
        let error = format!("{:#}", run(ask(false), &nobody).await.unwrap_err());
        assert!(error.contains("no health from http://127.0.0.1:4700"), "{error}");
        let other = Fake::new().app();
        let error = format!("{:#}", run(ask(false), &other).await.unwrap_err());
        assert!(error.contains("no health from http://127.0.0.1:4700"), "{error}");
    }
}
