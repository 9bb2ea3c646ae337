//! A member of the fleet that lies. It registers like any worker. Then it claims in the names of
//! others that work is done or failed, that records are bad, that they leave, and that checkpoints
//! are written. In its own name it claims work of others. All of its claims must be refused.

use std::ops::Not;
use std::time::Duration;

use ebbflow::random::Keyed;
use net::channel::Channel;
use net::session::{Secret, Shown};
use proto::ids::IncarnationId;
use proto::pb;
use proto::pb::fleet_client::FleetClient;
use tonic::metadata::MetadataMap;
use tonic::{Request, Status};

use crate::plan::{Dice, Plan};
use crate::{ambient, checks};

/// Lies until the faults end.
pub(crate) async fn run(seed: u64, plan: Plan, channel: Channel) {
    let mut dice = Dice(Keyed::new(seed, "liar", 0));
    while plan.lies && ambient::elapsed() < Duration::from_millis(plan.until_ms) {
        tokio::time::sleep(Duration::from_millis(dice.range(50, 2000))).await;
        // A master that is unreachable hears no lie.
        let mut fleet = FleetClient::new(channel.clone());
        let Ok(reply) = fleet.register(worker()).await else { continue };
        let reply = reply.into_inner();
        let secret = Secret::from_bytes(&reply.secret).expect("the master tells a secret");
        let shown = Shown { incarnation: IncarnationId(reply.incarnation), secret };
        let own = reply.incarnation;
        let other = own.checked_sub(dice.range(1, 8)).filter(|other| *other > 0).unwrap_or(own + 1);
        if let Some((lease, microbatches)) = checks::some_lease(dice.range(0, 99)).filter(|_| dice.one_in(2))
        {
            boast(&mut fleet, shown, lease, microbatches).await;
            continue;
        }
        let what = dice.range(0, 3);
        let believed = lie(&mut fleet, shown, other, what, &mut dice).await;
        assert!(believed.is_err(), "incarnation {other} was spoken for: {what}");
        checks::count("lies that nobody believed");
    }
}

fn worker() -> pb::RegisterRequest {
    pb::RegisterRequest {
        role: pb::ProcessRole::Worker.into(),
        name: "liar".to_owned(),
        program_version: proto::PROGRAM_VERSION.to_owned(),
        threads: 1,
        device: "cpu".to_owned(),
        ..Default::default()
    }
}

/// Claims in its own name that it has done the work of another worker's lease.
async fn boast(fleet: &mut FleetClient<Channel>, shown: Shown, lease: u64, microbatches: u64) {
    let incarnation = shown.incarnation.get();
    let reports = vec![pb::MicrobatchReport::default(); microbatches as usize];
    let result = match microbatches {
        0 => pb::complete_request::Result::Initialized(pb::Initialized::default()),
        _ => pb::complete_request::Result::Trained(pb::Trained {
            microbatches: reports,
            took_us: 1,
            ..pb::Trained::default()
        }),
    };
    let request =
        pb::CompleteRequest { incarnation, lease, result: Some(result), more: false, ..Default::default() };
    let reply = fleet.complete(signed(shown, request)).await;
    // A master that is unreachable hears no lie.
    assert!(
        reply.is_ok_and(|reply| reply.into_inner().accepted).not(),
        "lease {lease} was completed by a liar"
    );
    checks::count("boasts that nobody believed");
}

/// Sends a claim in the name of another process. An error is a refusal.
async fn lie(
    fleet: &mut FleetClient<Channel>,
    shown: Shown,
    other: u64,
    what: u64,
    dice: &mut Dice,
) -> Result<(), Status> {
    // Leases are numbered like incarnations.
    let lease = (other >> 40 << 40) + dice.range(1, 200);
    match what {
        0 => {
            let message = "a lie".to_owned();
            let request =
                pb::FailRequest { incarnation: other, lease, message, fatal: true, ..Default::default() };
            fleet.fail(signed(shown, request)).await.map(drop)
        }
        1 => {
            let result = Some(pb::complete_request::Result::Initialized(pb::Initialized::default()));
            let request =
                pb::CompleteRequest { incarnation: other, lease, result, more: true, ..Default::default() };
            fleet.complete(signed(shown, request)).await.map(drop)
        }
        2 => {
            let records = vec![pb::BadRecord { record: 0, reason: "a lie".to_owned() }];
            let set = pb::DataSet::Train.into();
            let request = pb::SkipRequest { incarnation: other, lease, set, records };
            fleet.skip(signed(shown, request)).await.map(drop)
        }
        _ => {
            let saved = pb::SavedPartition {
                report: 1,
                job: 1,
                version: dice.range(1, 1000),
                file: "partition-0".to_owned(),
                bytes: 1,
                ..Default::default()
            };
            let request = pb::HeartbeatRequest {
                incarnation: other,
                draining: true,
                saved: vec![saved],
                ..Default::default()
            };
            fleet.heartbeat(signed(shown, tokio_stream::iter([request]))).await.map(drop)
        }
    }
}

/// Returns a call with the secret of a session.
fn signed<T>(shown: Shown, request: T) -> Request<T> {
    let (mut headers, mut request) = (MetadataMap::new().into_headers(), Request::new(request));
    shown.show(&mut headers);
    *request.metadata_mut() = MetadataMap::from_headers(headers);
    request
}
