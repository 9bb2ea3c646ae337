"""An estimator after the manner of SageMaker: a script, its data and its output, and ``fit``.

The training runs in processes of this host, in containers, or on machines of Slurm, with a cluster
that ends with it.
``docs/migrate-from-sagemaker.md`` shows both sides.
"""

from __future__ import annotations

from ebbflow.estimator.channels import S3Uploader, TrainingInput
from ebbflow.estimator.estimator import PyTorch
from ebbflow.estimator.job import TrainingJob
from ebbflow.estimator.metrics import Metric

__all__ = ["Metric", "PyTorch", "S3Uploader", "TrainingInput", "TrainingJob"]
