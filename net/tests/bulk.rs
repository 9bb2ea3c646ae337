//! Calls past tonic's codec, with a server that uses the codec.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::sync::{Arc, Mutex};

use bytes::Bytes;
use net::bulk::{self, PULL, PUSH};
use net::channel::{Dialer, Listener, Purpose};
use proto::pb;
use proto::pb::parameters_server::{Parameters, ParametersServer};
use tonic::{Request, Response, Status, Streaming};

/// A server that keeps pushed messages and answers pulls with them.
#[derive(Clone, Default)]
struct Keeper(Arc<Mutex<Vec<pb::Chunks>>>);

#[tonic::async_trait]
impl Parameters for Keeper {
    type PullStream = tokio_stream::Iter<std::vec::IntoIter<Result<pb::PullReply, Status>>>;

    async fn push(
        &self,
        request: Request<Streaming<pb::PushRequest>>,
    ) -> Result<Response<pb::PushReply>, Status> {
        let mut stream = request.into_inner();
        while let Some(message) = stream.message().await? {
            match message.part {
                Some(pb::push_request::Part::Chunks(chunks)) => self.0.lock().unwrap().push(chunks),
                _ => return Err(Status::aborted("no chunks")),
            }
        }
        Ok(Response::new(pb::PushReply { outcome: 1, version: 9 }))
    }

    async fn pull(&self, _: Request<pb::PullRequest>) -> Result<Response<Self::PullStream>, Status> {
        let part = |chunks| Ok(pb::PullReply { part: Some(pb::pull_reply::Part::Chunks(chunks)) });
        let mut replies: Vec<_> = self.0.lock().unwrap().iter().cloned().map(part).collect();
        replies.push(Err(Status::data_loss("that was all")));
        Ok(Response::new(tokio_stream::iter(replies)))
    }

    async fn probe(&self, _: Request<pb::ProbeRequest>) -> Result<Response<pb::ProbeReply>, Status> {
        Err(Status::unimplemented("probe"))
    }
    async fn open(&self, _: Request<pb::OpenRequest>) -> Result<Response<pb::OpenReply>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn attach(&self, _: Request<pb::AttachRequest>) -> Result<Response<pb::AttachReply>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn squares(&self, _: Request<pb::SquaresRequest>) -> Result<Response<pb::SquaresReply>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn ledger(&self, _: Request<pb::LedgerRequest>) -> Result<Response<pb::LedgerReply>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn save(&self, _: Request<pb::SaveRequest>) -> Result<Response<pb::SaveReply>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn unpin(&self, _: Request<pb::UnpinRequest>) -> Result<Response<pb::UnpinReply>, Status> {
        Err(Status::unimplemented("not here"))
    }

    async fn close(&self, _: Request<pb::CloseRequest>) -> Result<Response<pb::CloseReply>, Status> {
        Err(Status::unimplemented("not here"))
    }
}

fn chunks(id: u32, bytes: usize) -> pb::Chunks {
    let values = Bytes::from_iter((0..bytes).map(|at| (at * 7) as u8));
    pb::Chunks { chunks: vec![pb::Chunk { id, values, region: None }] }
}

async fn exchange(dialer: Dialer) {
    let listener = Listener::beside(tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap()).unwrap();
    let address = listener.address().unwrap();
    let keeper = Keeper::default();
    let server = net::channel::server().add_service(ParametersServer::new(keeper.clone()));
    let serving = tokio::spawn(server.serve_with_incoming(listener.accept().unwrap()));
    let channel = dialer.channel(&format!("http://{address}"), Purpose::Bulk).unwrap();

    let pushed = [chunks(1, 3 << 20), chunks(2, 5), chunks(3, 100_000)];
    let part = |part| pb::PushRequest { part: Some(part) };
    let messages = pushed.clone().into_iter().map(pb::push_request::Part::Chunks).map(part);
    let mut replies = bulk::call(&channel, PUSH, messages).await.unwrap();
    assert_eq!(replies.message::<pb::PushReply>().await.unwrap().unwrap().version, 9);
    assert_eq!(replies.message::<pb::PushReply>().await.unwrap(), None);
    assert_eq!(*keeper.0.lock().unwrap(), pushed);

    let mut replies = bulk::call(&channel, PULL, std::iter::once(pb::PullRequest::default())).await.unwrap();
    for expected in pushed {
        let reply = replies.message::<pb::PullReply>().await.unwrap().unwrap();
        assert_eq!(reply.part, Some(pb::pull_reply::Part::Chunks(expected)));
    }
    let end = replies.message::<pb::PullReply>().await.unwrap_err();
    assert_eq!((end.code(), end.message()), (tonic::Code::DataLoss, "that was all"));

    let nothing = std::iter::once(pb::PushRequest::default());
    let mut refused = bulk::call(&channel, PUSH, nothing).await.unwrap();
    let answered = refused.is_answered();
    let refused = refused.message::<pb::PushReply>().await.unwrap_err();
    assert!(answered, "not refused at once");
    assert_eq!((refused.code(), refused.message()), (tonic::Code::Aborted, "no chunks"));
    serving.abort();
}

#[tokio::test]
async fn a_server_with_a_codec_understands_them_over_tcp() {
    exchange(Dialer::tcp()).await;
}

#[tokio::test]
async fn and_over_a_unix_socket() {
    exchange(Dialer::nearest()).await;
}
