//! The settings of a worker that takes scripts: what is wrong in them, and what they mean.

use model::Device;
use proto::script::AGENT_PROCESSES_MAX;

use super::Settings;
use crate::agent::Allowed;

/// Returns the number of processes of scripts that a worker runs at a time; `None`: it takes no
/// scripts. Without a setting it is one for each of `devices`, which the processes have.
pub(crate) fn processes(settings: &Settings, devices: &[Device]) -> Option<u32> {
    let count = settings.count("script_processes").and_then(|count| u32::try_from(count).ok());
    settings.switch("scripts").then(|| count.unwrap_or_else(|| one_for_each(devices)))
}

/// Returns the number of devices within the bounds of `script_processes`.
fn one_for_each(devices: &[Device]) -> u32 {
    u32::try_from(devices.len()).unwrap_or(u32::MAX).clamp(1, AGENT_PROCESSES_MAX)
}

/// Returns what is wrong in the settings of scripts.
pub(super) fn violations(settings: &Settings) -> Vec<String> {
    let mut wrong = Vec::new();
    if !(1..=u64::from(AGENT_PROCESSES_MAX)).contains(&settings.count("script_processes").unwrap_or(1)) {
        wrong.push(format!("script_processes: from 1 to {AGENT_PROCESSES_MAX}"));
    }
    let index = settings.text("script_requirements");
    if let Some(reason) = index.and_then(index_refusal) {
        wrong.push(format!("script_requirements: {reason}"));
    }
    for key in ["script_requirements_time", "script_requirements_disk"] {
        if settings.is_given(key) && index.is_none() {
            wrong.push(format!("{key}: is of use only with --script-requirements, which is not set"));
        }
        if settings.duration(key).is_some_and(|time| time.is_zero()) || settings.bytes(key) == Some(0) {
            wrong.push(format!("{key}: more than zero"));
        }
    }
    wrong
}

/// Returns why a URL cannot be that of an index of packages; `None`: it can.
fn index_refusal(url: &str) -> Option<&'static str> {
    let (is_plain, rest) = match (url.strip_prefix("https://"), url.strip_prefix("http://")) {
        (Some(rest), _) => (false, rest),
        (None, Some(rest)) => (true, rest),
        (None, None) => return Some("a URL that begins with https://"),
    };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let port = authority.rfind(':').filter(|&at| !authority[at..].contains(']'));
    let host = &authority[..port.unwrap_or(authority.len())];
    if !url.chars().all(|letter| letter.is_ascii_graphic()) || host.is_empty() {
        Some("a URL with a host, without spaces and control characters")
    } else if authority.contains('@') {
        Some("a URL without a user and a password, which every process of this machine could read")
    } else if is_plain && !["127.0.0.1", "localhost", "[::1]"].contains(&host) {
        Some("https:// for an index on another machine, so that nobody changes packages on their way")
    } else {
        None
    }
}

/// Returns what a worker installs for scripts; `None`: nothing.
pub(crate) fn requirements(settings: &Settings) -> Option<Allowed> {
    Some(Allowed {
        index: settings.text("script_requirements")?.to_owned(),
        time: settings.duration("script_requirements_time")?,
        disk: settings.bytes("script_requirements_disk")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_device_has_a_process_and_a_host_without_one_has_one() {
        let cuda: Vec<_> = (0..300).map(Device::Cuda).collect();
        assert_eq!(one_for_each(&[]), 1);
        assert_eq!(one_for_each(&[Device::Cpu]), 1);
        assert_eq!(one_for_each(&cuda[..3]), 3);
        assert_eq!(one_for_each(&cuda), AGENT_PROCESSES_MAX);
    }

    #[test]
    fn an_index_is_reached_in_private_and_without_a_password() {
        for good in [
            "https://host/simple",
            "https://host:8443",
            "http://127.0.0.1:80/x",
            "http://localhost",
            "http://[::1]:1/",
        ] {
            assert_eq!(index_refusal(good), None, "{good}");
        }
        for (wrong, reason) in [
            ("", "begins with https://"),
            ("--extra-index-url", "begins with https://"),
            ("/folder", "begins with https://"),
            ("https://", "with a host"),
            ("https://:80/", "with a host"),
            ("https://host/ x", "without spaces"),
            ("https://host/\u{e9}", "without spaces"),
            ("https://user:password@host/", "without a user"),
            ("https://user@host", "without a user"),
            ("http://host/simple", "https:// for an index"),
            ("http://127.0.0.1.host/", "https:// for an index"),
        ] {
            assert!(index_refusal(wrong).unwrap().contains(reason), "{wrong}");
        }
    }
}
