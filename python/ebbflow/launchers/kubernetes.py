"""Each role is a job of Kubernetes with one pod. ``kubectl`` applies them and takes them away.

This has never run on a cluster. The manifests are checked against the schemas of Kubernetes, and
the tests have a ``kubectl`` of their own that starts the containers' commands on the host.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ebbflow.errors import ClusterError, InvalidJobError, UnsupportedError
from ebbflow.launchers.platform import (
    Guard,
    Master,
    Role,
    Settings,
    last_lines,
    plain_environment,
)

__all__ = ["Kubernetes"]

_PORT = 4700

#: Label of everything that belongs to one launch.
_LABEL = "ebbflow/launch"

#: A user that is not root, as in the images of ``deploy/``.
_USER = 10001

#: The only folder that a role writes.
_TMP = "/tmp"

#: ``kubectl port-forward`` prints this.
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+) ")

_KINDS = "jobs,services,networkpolicies"


class Kubernetes:
    """Jobs in the namespace of the current context of ``kubectl``."""

    master_listens = f"0.0.0.0:{_PORT}"
    is_remote = True
    interval = 2.0

    def __init__(self, settings: Settings) -> None:
        if settings.image is None:
            raise InvalidJobError(
                "--image: missing; Kubernetes needs an image with Python, ebbflow and what the "
                "script imports"
            )
        self._settings = settings
        self._image = settings.image
        self._environment = plain_environment()
        self._started: set[str] = set()
        self._forward: subprocess.Popen[bytes] | None = None
        self._forwarded = settings.folder / "port-forward.log"
        self._port = ""
        #: All manifests of the launch. They stay after its end.
        self._manifests = settings.out / "kubernetes.yaml"
        self._manifests.write_text("")
        self._kubectl = shutil.which("kubectl")
        selector = f"{_LABEL}={settings.name}"
        self._of_launch = f"--selector={selector}"
        delete = ["kubectl", "delete", _KINDS, self._of_launch, "--ignore-not-found"]
        delete += ["--cascade=foreground", "--timeout=60s"]
        self._guard: Guard | None = None
        if self._kubectl is not None:
            self._guard = Guard(delete, self._environment)

    @property
    def master_url(self) -> str:
        """URL of the master's service."""
        return f"http://{self._settings.name}-master:{_PORT}"

    def start(self, role: Role) -> None:
        """Apply the manifest of a role. Without ``kubectl`` it is written only.

        Raises:
            ClusterError: Kubernetes refuses it.
        """
        objects = [self._job(role)]
        if role.name == "master":
            objects += [self._service(), self._policy()]
        # JSON is YAML.
        text = "".join(f"---\n{json.dumps(manifest, indent=2)}\n" for manifest in objects)
        with self._manifests.open("a") as file:
            file.write(text)
        if self._guard is None:
            return
        said = self._run("apply", "--filename=-", manifest=text)
        if said.returncode != 0:
            raise ClusterError(f"kubectl refuses {role.name}: {said.stderr.strip()}")
        self._started.add(role.full_name)

    def master(self) -> Master | None:
        """Return the master's service, and the port on this host that leads to it.

        Raises:
            UnsupportedError: There is no ``kubectl``.
        """
        if self._guard is None:
            raise UnsupportedError(
                f"--on kubernetes: no kubectl on PATH, so nothing was started; apply "
                f"{self._manifests} where it is, and send the script through `kubectl port-forward "
                f"service/{self._settings.name}-master {_PORT}` by `ebb submit`"
            )
        if self._forward is None and not self._is_ready("master-0"):
            return None
        self._keep_forwarding()
        found = _FORWARDING.search("\n".join(last_lines(self._forwarded)))
        if found is None:
            return None
        self._port = found[1]
        return Master(self.master_url, f"http://127.0.0.1:{self._port}")

    def ended(self) -> Mapping[str, str]:
        """Return the conditions of jobs that have ended. Without an answer there are none."""
        if self._forward is not None:
            self._keep_forwarding()
        jobs = self._jobs()
        if jobs is None:
            return {}
        ended = dict.fromkeys(self._started - jobs.keys(), "was deleted")
        for name, job in jobs.items():
            for condition in job.get("status", {}).get("conditions", []):
                if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
                    why = condition.get("message") or condition.get("reason") or "without a reason"
                    ended[name] = f"has ended ({condition['type']}: {why})"
        return ended

    def output(self, role: Role) -> list[str]:
        """Return the last lines of a pod."""
        said = self._run("logs", f"job/{self._name(role.full_name)}", "--tail=20")
        return said.stdout.splitlines() if said.returncode == 0 else []

    def stop(self) -> None:
        """Delete everything that has the label of this launch.

        Raises:
            ClusterError: Kubernetes does not take the order.
        """
        if self._forward is not None:
            self._forward.terminate()
            self._forward.wait()
        if self._guard is not None and self._guard.release() != 0:
            delete = f"kubectl delete {_KINDS} {self._of_launch}"
            raise ClusterError(f"pods of this launch may go on; delete them with: {delete}")

    def _run(self, *arguments: str, manifest: str = "") -> subprocess.CompletedProcess[str]:
        assert self._guard is not None
        return subprocess.run(
            ["kubectl", *arguments],
            input=manifest,
            capture_output=True,
            text=True,
            check=False,
            env=self._environment,
            pass_fds=(self._guard.pipe,) if arguments[0] == "apply" else (),
        )

    def _jobs(self) -> dict[str, Any] | None:
        """Return the jobs of this launch by the full names of their roles."""
        said = self._run("get", "jobs", self._of_launch, "--output=json")
        if said.returncode != 0:
            return None
        prefix = f"{self._settings.name}-"
        jobs = json.loads(said.stdout)["items"]
        return {job["metadata"]["name"].removeprefix(prefix): job for job in jobs}

    def _is_ready(self, full_name: str) -> bool:
        job = (self._jobs() or {}).get(full_name, {})
        return int(job.get("status", {}).get("ready") or 0) > 0

    def _keep_forwarding(self) -> None:
        """Start the way to the master, and start it again at its port when it breaks."""
        if self._forward is not None and self._forward.poll() is None:
            return
        service = f"service/{self._settings.name}-master"
        forward = ["kubectl", "port-forward", service, f"{self._port}:{_PORT}"]
        with self._forwarded.open("wb") as output:
            self._forward = subprocess.Popen(
                [sys.executable, "-m", "ebbflow._launched", str(os.getpid()), "--exec", *forward],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def _name(self, full_name: str) -> str:
        return f"{self._settings.name}-{full_name}"

    def _metadata(self, name: str) -> dict[str, Any]:
        return {"name": name, "labels": self._labels()}

    def _labels(self) -> dict[str, str]:
        return {"app.kubernetes.io/part-of": "ebbflow", _LABEL: self._settings.name}

    def _service(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(f"{self._settings.name}-master"),
            "spec": {
                "selector": {_LABEL: self._settings.name, "ebbflow/role": "master"},
                "ports": [{"name": "grpc", "port": _PORT}],
            },
        }

    def _policy(self) -> dict[str, Any]:
        """Return the rule that only roles of this launch reach each other: they have no keys."""
        own = {"podSelector": {"matchLabels": {_LABEL: self._settings.name}}}
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": self._metadata(self._settings.name),
            "spec": {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]},
        }

    def _job(self, role: Role) -> dict[str, Any]:
        labels = {**self._labels(), "ebbflow/role": role.name}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": self._name(role.full_name), "labels": labels},
            "spec": {
                # The launcher starts roles again, and counts.
                "backoffLimit": 0,
                "template": {"metadata": {"labels": labels}, "spec": self._pod(role)},
            },
        }

    def _pod(self, role: Role) -> dict[str, Any]:
        python = self._settings.python or "python3"
        resources: dict[str, Any] = {"requests": {"cpu": str(role.cpus)}}
        if role.gpu:
            resources["limits"] = {"nvidia.com/gpu": "1"}
        container = {
            "name": "ebb",
            "image": self._image,
            "command": [python, "-m", "ebbflow"],
            "args": role.at("$(POD_IP)", f"{_TMP}/ebbflow"),
            "workingDir": _TMP,
            "env": [
                {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "HOME", "value": _TMP},
            ],
            "resources": resources,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [{"name": "tmp", "mountPath": _TMP}],
        }
        if role.name == "master":
            container["readinessProbe"] = {"tcpSocket": {"port": _PORT}, "periodSeconds": 2}
        return {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 35,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "fsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        }
