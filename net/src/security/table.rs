//! The table of calls and their allowed callers, consulted by one pure function at the edge of
//! every server.
//!
//! The role of a token is a purpose, not a rank: each call of an operator is listed. Calls outside
//! the table do not exist. A test compares the table with the schema, so that a new call must say
//! who may make it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use proto::pb::ProcessRole;
use proto::status::{Failure, Kind};

/// TokenRole of a token: what its bearer may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TokenRole {
    /// User who looks at jobs and fetches their results.
    Read,
    /// User who also starts jobs.
    Submit,
    /// User who also stops, pauses and scales every user's jobs.
    Operate,
    /// A worker.
    Worker,
    /// A ps.
    Ps,
    /// The master, when it calls a ps.
    Master,
    /// A program that trains with a loop of its own: it submits its job and is one of its workers.
    Script,
}

impl TokenRole {
    /// All roles.
    pub const ALL: [Self; 7] =
        [Self::Read, Self::Submit, Self::Operate, Self::Worker, Self::Ps, Self::Master, Self::Script];

    /// Returns the role's name in lists of tokens and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Submit => "submit",
            Self::Operate => "operate",
            Self::Worker => "worker",
            Self::Ps => "ps",
            Self::Master => "master",
            Self::Script => "script",
        }
    }

    /// Returns whether the bearer is a program with a loop of its own: its jobs and workers are of
    /// that kind alone. Files of other jobs are programs that every worker would run.
    pub const fn is_for_programs(self) -> bool {
        matches!(self, Self::Script)
    }

    /// Returns whether a bearer may be given the right to send scripts.
    pub const fn may_send_scripts(self) -> bool {
        matches!(self, Self::Submit | Self::Operate)
    }

    /// Returns whether the bearer may join the fleet in the role `process`. A worker must not
    /// become a ps, which gets weights.
    pub const fn may_join_as(self, process: ProcessRole) -> bool {
        matches!(
            (self, process),
            (Self::Worker | Self::Script, ProcessRole::Worker) | (Self::Ps, ProcessRole::Ps)
        )
    }
}

impl fmt::Display for TokenRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TokenRole {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|role| role.name() == name)
            .ok_or_else(|| format!("no role `{name}`; expected {}", Self::ALL.map(Self::name).join(", ")))
    }
}

/// Callers that may make a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Every client that can connect, such as a machine without a token that asks whether the
    /// server lives.
    Anybodys,
    /// Every bearer of a token.
    Holders,
    /// Bearers of tokens with these roles.
    Of(&'static [TokenRole]),
}

const USERS: Whose = Whose::Of(&[TokenRole::Read, TokenRole::Submit, TokenRole::Operate, TokenRole::Script]);
const SUBMITTERS: Whose = Whose::Of(&[TokenRole::Submit, TokenRole::Operate, TokenRole::Script]);
// A program of the role `script` submits its own job alone, and no code for others.
const SENDERS: Whose = Whose::Of(&[TokenRole::Submit, TokenRole::Operate]);
const OPERATORS: Whose = Whose::Of(&[TokenRole::Operate]);
const WORKERS: Whose = Whose::Of(&[TokenRole::Worker, TokenRole::Script]);
// A program is trusted with its own jobs alone, and the memory of a ps has those of all owners.
const SHARERS: Whose = Whose::Of(&[TokenRole::Worker]);
const AGENTS: Whose = Whose::Of(&[TokenRole::Worker]);
// The handler lets a program stop nothing but the election of its own script.
const CANCELLERS: Whose = Whose::Of(&[TokenRole::Operate, TokenRole::Script]);
const PROCESSES: Whose = Whose::Of(&[TokenRole::Worker, TokenRole::Ps, TokenRole::Script]);
const PS: Whose = Whose::Of(&[TokenRole::Ps]);
const MASTERS: Whose = Whose::Of(&[TokenRole::Master]);

/// The call by which a worker and a ps of one host map each other's memory. A program does not know
/// that its token is not for it. It asks, and goes on by a socket.
pub(super) const ATTACH: &str = "/ebbflow.v1.Parameters/Attach";

/// Table of calls: the call's path in HTTP/2, and its allowed callers.
const TABLE: [(&str, Whose); 39] = [
    ("/ebbflow.v1.Jobs/Submit", SUBMITTERS),
    ("/ebbflow.v1.Jobs/List", USERS),
    ("/ebbflow.v1.Jobs/Status", USERS),
    ("/ebbflow.v1.Jobs/Watch", USERS),
    ("/ebbflow.v1.Jobs/Cancel", CANCELLERS),
    ("/ebbflow.v1.Jobs/Scale", OPERATORS),
    ("/ebbflow.v1.Jobs/Pause", OPERATORS),
    ("/ebbflow.v1.Jobs/Resume", OPERATORS),
    ("/ebbflow.v1.Jobs/Fetch", USERS),
    // The message says in which role a process registers, so the handler checks it.
    ("/ebbflow.v1.Fleet/Register", PROCESSES),
    ("/ebbflow.v1.Fleet/Heartbeat", PROCESSES),
    ("/ebbflow.v1.Fleet/Lease", WORKERS),
    ("/ebbflow.v1.Fleet/Job", WORKERS),
    ("/ebbflow.v1.Fleet/Describe", WORKERS),
    ("/ebbflow.v1.Fleet/Complete", WORKERS),
    ("/ebbflow.v1.Fleet/Skip", WORKERS),
    ("/ebbflow.v1.Fleet/Fail", WORKERS),
    ("/ebbflow.v1.Fleet/Release", WORKERS),
    ("/ebbflow.v1.Fleet/Download", WORKERS),
    ("/ebbflow.v1.Fleet/Upload", WORKERS),
    ("/ebbflow.v1.Scripts/Submit", SENDERS),
    ("/ebbflow.v1.Scripts/Attend", AGENTS),
    ("/ebbflow.v1.Scripts/Bundle", AGENTS),
    ("/ebbflow.v1.Scripts/Stage", AGENTS),
    // The handler compares the caller with the owner of the script.
    ("/ebbflow.v1.Scripts/Logs", SENDERS),
    ("/ebbflow.v1.Parameters/Probe", MASTERS),
    ("/ebbflow.v1.Parameters/Open", MASTERS),
    ("/ebbflow.v1.Parameters/Push", WORKERS),
    ("/ebbflow.v1.Parameters/Pull", WORKERS),
    (ATTACH, SHARERS),
    ("/ebbflow.v1.Parameters/Squares", PS),
    ("/ebbflow.v1.Parameters/Ledger", MASTERS),
    ("/ebbflow.v1.Parameters/Save", MASTERS),
    ("/ebbflow.v1.Parameters/Unpin", MASTERS),
    ("/ebbflow.v1.Parameters/Close", MASTERS),
    ("/grpc.health.v1.Health/Check", Whose::Anybodys),
    ("/grpc.health.v1.Health/Watch", Whose::Anybodys),
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Whose::Holders),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Whose::Holders),
];

/// Calls that an agent forwards for the processes of a script.
const FORWARDED: [&str; 19] = [
    "/ebbflow.v1.Jobs/Submit",
    "/ebbflow.v1.Jobs/List",
    "/ebbflow.v1.Jobs/Status",
    "/ebbflow.v1.Jobs/Watch",
    "/ebbflow.v1.Jobs/Cancel",
    "/ebbflow.v1.Jobs/Fetch",
    "/ebbflow.v1.Fleet/Register",
    "/ebbflow.v1.Fleet/Heartbeat",
    "/ebbflow.v1.Fleet/Lease",
    "/ebbflow.v1.Fleet/Job",
    "/ebbflow.v1.Fleet/Describe",
    "/ebbflow.v1.Fleet/Complete",
    "/ebbflow.v1.Fleet/Skip",
    "/ebbflow.v1.Fleet/Fail",
    "/ebbflow.v1.Fleet/Release",
    "/ebbflow.v1.Fleet/Download",
    "/ebbflow.v1.Fleet/Upload",
    "/ebbflow.v1.Parameters/Push",
    "/ebbflow.v1.Parameters/Pull",
];

/// Returns whether an agent forwards a call for the processes of a script.
pub(crate) fn is_forwarded(call: &str) -> bool {
    FORWARDED.contains(&call)
}

/// Returns who may make a call, or `None` for a call that no server of ours has.
pub fn whose(call: &str) -> Option<Whose> {
    TABLE.iter().find(|(name, _)| *name == call).map(|(_, whose)| *whose)
}

/// Returns the call's name from the table, or an empty one for a call that no server of ours has.
pub(super) fn name(call: &str) -> &'static str {
    TABLE.iter().find(|(name, _)| *name == call).map_or("", |(name, _)| name)
}

/// Checks that a caller may make this call. `role` is that of a good token, `None` means that there
/// was no token.
///
/// # Errors
/// The caller may not; the error says what is missing.
pub fn decide(call: &str, role: Option<TokenRole>) -> Result<(), Failure> {
    let Some(whose) = whose(call) else {
        let message = format!("this program has no call `{call}`; is the other end of another version?");
        return Err(Failure::new(Kind::Incompatible, message));
    };
    match (whose, role) {
        (Whose::Anybodys, _) | (Whose::Holders, Some(_)) => Ok(()),
        (Whose::Of(roles), Some(role)) if roles.contains(&role) => Ok(()),
        (_, None) => {
            let message =
                format!("`{}` needs a token; give one with --token-file or EBB_TOKEN_FILE", verb(call));
            Err(Failure::new(Kind::Unauthenticated, message))
        }
        (Whose::Of(roles), Some(role)) => {
            let roles: Vec<_> = roles.iter().map(|role| role.name()).collect();
            let message = format!(
                "a token of the role `{role}` may not `{}`; that takes one of the role {}",
                verb(call),
                roles.join(" or ")
            );
            Err(Failure::new(Kind::Denied, message))
        }
    }
}

/// Returns the end of a call's path, such as `Jobs/Submit`.
pub(crate) fn verb(call: &str) -> &str {
    call.rsplit_once('.').map_or(call, |(_, verb)| verb)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prost::Message as _;
    use prost_types::FileDescriptorSet;

    use super::*;

    fn calls_of(descriptors: &[u8]) -> BTreeSet<String> {
        let set = FileDescriptorSet::decode(descriptors).expect("a schema");
        let mut calls = BTreeSet::new();
        for file in &set.file {
            for service in &file.service {
                let name = |call: &str| format!("/{}.{}/{call}", file.package(), service.name());
                calls.extend(service.method.iter().map(|method| name(method.name())));
            }
        }
        calls
    }

    #[test]
    fn every_call_of_the_schema_is_in_the_table_and_nothing_else() {
        let listed: BTreeSet<String> = TABLE.iter().map(|(call, _)| (*call).to_owned()).collect();
        assert_eq!(listed.len(), TABLE.len(), "a call is listed twice");
        let ours = |call: &&String| call.starts_with("/ebbflow.");
        let of_ours: BTreeSet<String> = listed.iter().filter(ours).cloned().collect();
        let schema = calls_of(proto::pb::FILE_DESCRIPTOR_SET);
        let missing: Vec<_> = schema.difference(&of_ours).collect();
        assert!(missing.is_empty(), "say in TABLE whose these calls are: {missing:?}");
        let gone: Vec<_> = of_ours.difference(&schema).collect();
        assert!(gone.is_empty(), "not in the schema any more: {gone:?}");
        // Calls that tonic adds to our servers.
        let others: Vec<_> = listed.difference(&of_ours).map(String::as_str).collect();
        let health = tonic_health::pb::FILE_DESCRIPTOR_SET;
        let reflection = tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET;
        let alpha = tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET;
        let added: BTreeSet<String> = [health, reflection, alpha].into_iter().flat_map(calls_of).collect();
        assert_eq!(others, added.iter().map(String::as_str).collect::<Vec<_>>());
    }

    #[test]
    fn a_token_does_what_its_role_is_for() {
        let may = |call: &str, role: TokenRole| decide(&format!("/ebbflow.v1.{call}"), Some(role)).is_ok();
        for (call, roles) in [
            ("Jobs/Submit", &[TokenRole::Submit, TokenRole::Operate, TokenRole::Script][..]),
            ("Jobs/Status", &[TokenRole::Read, TokenRole::Submit, TokenRole::Operate, TokenRole::Script]),
            ("Jobs/Cancel", &[TokenRole::Operate, TokenRole::Script]),
            ("Jobs/Scale", &[TokenRole::Operate]),
            ("Fleet/Register", &[TokenRole::Worker, TokenRole::Ps, TokenRole::Script]),
            ("Fleet/Lease", &[TokenRole::Worker, TokenRole::Script]),
            ("Fleet/Skip", &[TokenRole::Worker, TokenRole::Script]),
            ("Scripts/Submit", &[TokenRole::Submit, TokenRole::Operate]),
            ("Scripts/Attend", &[TokenRole::Worker]),
            ("Parameters/Push", &[TokenRole::Worker, TokenRole::Script]),
            ("Parameters/Attach", &[TokenRole::Worker]),
            ("Parameters/Squares", &[TokenRole::Ps]),
            ("Parameters/Close", &[TokenRole::Master]),
        ] {
            for role in TokenRole::ALL {
                assert_eq!(may(call, role), roles.contains(&role), "{call} with {role}");
            }
        }
    }

    #[test]
    fn an_agent_forwards_what_a_program_with_a_loop_of_its_own_may_do() {
        assert!(FORWARDED.iter().all(|call| decide(call, Some(TokenRole::Script)).is_ok()));
        for call in ["Parameters/Attach", "Scripts/Bundle", "Scripts/Attend", "Jobs/Scale", "Parameters/Open"]
        {
            assert!(!is_forwarded(&format!("/ebbflow.v1.{call}")), "{call}");
        }
    }

    #[test]
    fn what_is_lacking_is_said() {
        let kind = |call: &str, role| decide(call, role).unwrap_err();
        let none = kind("/ebbflow.v1.Jobs/Submit", None);
        assert!(none.kind == Kind::Unauthenticated && none.message.contains("--token-file"), "{none}");
        let wrong = kind("/ebbflow.v1.Jobs/Submit", Some(TokenRole::Worker));
        assert_eq!(wrong.kind, Kind::Denied);
        assert_eq!(
            wrong.message,
            "a token of the role `worker` may not `Jobs/Submit`; that takes one of the role submit or operate or \
             script"
        );
        assert_eq!(kind("/ebbflow.v1.Jobs/Drop", Some(TokenRole::Operate)).kind, Kind::Incompatible);
        assert!(decide("/grpc.health.v1.Health/Check", None).is_ok());
        for version in ["v1", "v1alpha"] {
            let reflection = format!("/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo");
            assert_eq!(kind(&reflection, None).kind, Kind::Unauthenticated);
            assert!(decide(&reflection, Some(TokenRole::Read)).is_ok());
        }
    }

    #[test]
    fn a_worker_does_not_join_as_a_ps() {
        assert!(
            TokenRole::Worker.may_join_as(ProcessRole::Worker) && TokenRole::Ps.may_join_as(ProcessRole::Ps)
        );
        assert!(
            !TokenRole::Worker.may_join_as(ProcessRole::Ps)
                && !TokenRole::Ps.may_join_as(ProcessRole::Worker)
        );
        assert!(!TokenRole::Operate.may_join_as(ProcessRole::Worker));
        assert!(TokenRole::Script.may_join_as(ProcessRole::Worker));
        assert!(!TokenRole::Script.may_join_as(ProcessRole::Ps));
    }

    #[test]
    fn names_of_roles_are_read_as_they_are_written() {
        for role in TokenRole::ALL {
            assert_eq!(role.name().parse(), Ok(role));
            assert_eq!(serde_json::to_string(&role).unwrap(), format!("\"{role}\""));
        }
        assert!("root".parse::<TokenRole>().unwrap_err().contains("read, submit"));
    }
}
