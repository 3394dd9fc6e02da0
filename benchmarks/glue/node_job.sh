#!/bin/bash
# A job's node without Slurm: freezes a one-node cell and runs what srun would run, with Slurm's
# variables set by hand. Prints the run directory, seconds and exit code, and keeps node.log there.
#
#   benchmarks/glue/node_job.sh backend=nemo glue=ours model=small-llama model.path=models/small-llama ...
#
# cluster=slurm and one node with one GPU are added. Needs what NeMo RL needs, and no Slurm.
set -uo pipefail

run_dir=$(python3 - "$@" <<'PYTHON'
import sys

from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.runs.frozen_code import freeze_code
from fp8_nemo.nemo_config.checkout import host_of
from fp8_nemo.runs.run_dir import freeze
from fp8_nemo.runs.slurm import sbatch_command, write_job_files

ONE_NODE = ["cluster=slurm", "cluster.nodes=1", "cluster.gpus_per_node=1", "cluster.join_timeout=90"]
[plan] = compose_plans([*ONE_NODE, *sys.argv[1:]], host_of)
[frozen] = freeze([plan])
write_job_files(plan, freeze_code(frozen.path.parents[2]))
sbatch_command(plan)  # a plan that sbatch would not take stops here
print(frozen.path.absolute())
PYTHON
) || exit
attempt=$run_dir/log/job-1-0
mkdir -p "$attempt" && echo "$attempt" >"$run_dir/job/attempt"
while IFS= read -r -d '' setting; do export "${setting?}"; done <"$run_dir/job/settings"
export FP8_NEMO_JOB_END=$(($(date +%s) + 3600)) RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n') && export RAY_AUTH_TOKEN
SLURM_CPUS_ON_NODE=$(nproc) && export SLURM_CPUS_ON_NODE
export SLURM_JOB_ID=1 SLURMD_NODENAME=gpu1 SLURM_NODEID=0

bash "$FP8_NEMO_CODE/fp8_nemo/slurm/node.sh" "$run_dir" "$attempt" gpu1 >"$run_dir/log/node.log" 2>&1
code=$?
echo "$run_dir: node.sh ended with code $code after $SECONDS seconds"
exit $code
