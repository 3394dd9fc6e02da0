#!/bin/bash
# One node of a job: Ray on every node, the frozen plan on the first. Started by grpo.sbatch, in the
# container where one is named: node.sh RUN_DIR ATTEMPT NODE...
#
# Nodes talk through files in ATTEMPT, on the folder they share: `head` holds Ray's address, `stop`
# asks to save, `kill` to end at once, `term` says that Slurm ends the step, `lost` which nodes Ray no
# longer has, `ended` that the first node is done, `failed-NODE` why.

run_dir=$1 attempt=$2
shift 2
nodes=("$@") me=$SLURMD_NODENAME rank=$SLURM_NODEID cpus=$SLURM_CPUS_ON_NODE

# Known ports, below every ephemeral range and out of NeMo RL's own (from 1400): 12 a node, so that
# jobs and nodes that share a host do not meet. Workers' lie from 2000 to 2999, as many as a node's
# processors may start and its GPUs, apart while they fit: Ray draws one at random and looks whether it
# is free before the worker binds it, so two that draw from the same may meet (docs/research/log.md, 2026-11-23).
workers=$((58 + 2 * cpus < 1000 ? 58 + 2 * cpus : 1000))
for turn in {0..7}; do
    slot=$(((SLURM_JOB_ID + turn) % 8 * 2 + (rank > 0)))
    port=$((1200 + 12 * slot))
    worker_port=$((2000 + workers * slot % (1001 - workers)))
    # Free: no job holds its lock, and no socket listens, as the kernel writes it: local address and
    # port, none remote, state 0A.
    lock=/tmp/fp8-nemo-ports-$slot.lock
    [[ -e $lock ]] || (umask 0 && : >"$lock")
    listens=$(seq "$port" $((port + 7)) | xargs printf ':%04X [0-9A-F:]+ 0A |')
    { exec 9<"$lock"; } 2>/dev/null && flock --nonblock 9 &&
        ! grep -qE "${listens%|}" /proc/net/tcp /proc/net/tcp6 && found=yes && break
done

stage="cluster.setup"
say() { echo "[$(date +%FT%T) $me] $*"; }
leave() {
    local code=$?
    trap - EXIT
    trap '' TERM # a second one must not leave Ray behind
    if ((code)) && ! over && ! ended_by_term "$code"; then
        say "$stage failed with code $code"
        echo "$me: $stage failed with code $code" >"$attempt/failed-$me"
    fi
    ((rank == 0)) && touch "$attempt/ended"
    [[ -n ${driver-} ]] && kill -KILL "$driver" 2>/dev/null
    [[ -n ${ray-} ]] && end_ray
    [[ -n ${ray_folder-} ]] && end_strays
    if [[ -e $attempt/failed-$me ]]; then
        [[ -d ${ray_folder-} ]] && say "Ray's own logs stay on this node: $ray_folder"
    elif [[ -n ${ray_folder-} ]]; then
        rm -rf "$ray_folder"
    fi
    exit "$code"
}
ended_by_term() { # Slurm has told the step to end, and the run has done so: it saved, or was killed by it
    [[ -e $attempt/term ]] && (($1 == 130 || $1 == 143))
}
pause() { # a second; not `wait`: a TERM to all in it, and bash 5.2 waits for ever for the dead driver
    sleep 1
}
drain=10 # seconds, of the 45 that grpo.sbatch leaves before a limit; Ray takes two
end_ray() { # by force, with what it started, where it does not end by itself
    local waited
    kill -TERM "$ray" 2>/dev/null
    for ((waited = 0; waited < drain; waited++)); do
        kill -0 "$ray" 2>/dev/null || return
        pause
    done
    say "Ray did not end within $drain seconds, and is killed"
    local stat fields
    for stat in /proc/[0-9]*/stat; do # its children, by their parent's number behind the name
        fields=$(cat "$stat" 2>/dev/null) && fields=${fields##*) } && set -- $fields
        [[ ${2-} == "$ray" ]] && kill -KILL "${stat//[^0-9]/}" 2>/dev/null
    done
    kill -KILL "$ray"
}
end_strays() { # an agent of Ray's may outlive it, on ports that the next job would want
    local file
    while read -r file; do
        kill -KILL "${file//[^0-9]/}" 2>/dev/null
    done < <(env -u FP8_NEMO_RAY grep -lzxF "FP8_NEMO_RAY=$FP8_NEMO_RAY" /proc/[0-9]*/environ 2>/dev/null)
}
over() { # the first node is done, one has failed, time is up, or a newer attempt has the directory
    [[ -e $attempt/ended || -e $attempt/kill || $(<"$run_dir/job/attempt") != "$attempt" ]] ||
        compgen -G "$attempt/failed-*" >/dev/null
}
trap leave EXIT
trap 'touch "$attempt/term"' TERM # the run hears it too, and saves: wait for that

[[ -n ${found-} ]] || {
    stage="looking for free ports (1200 to 1391 are in use, \`ss -ltnp\` says by whom)"
    exit 1
}
[[ -w $attempt ]] || { stage="$attempt cannot be written on this node, cluster.mounts or outputs"; exit 1; }
while IFS= read -r -d '' setting; do export "${setting?}"; done <"$run_dir/job/settings" # over an image's
own=$(declare -p run_dir attempt nodes me rank cpus workers port worker_port lock stage)
source "$run_dir/job/setup.sh" || exit
eval "$own" # setup may use the same names, and options that would end this script
set +eu +o pipefail

# Where Slurm does not count GPUs it names none, and vLLM's workers look their own up by number.
if [[ -z ${SLURM_STEP_GPUS-}${SLURM_JOB_GPUS-} ]] && gpus=$(nvidia-smi -L 2>/dev/null | grep -c ^GPU); then
    CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((gpus - 1)))
    export CUDA_VISIBLE_DEVICES
fi

# Ray, and whatever uses MPI under it, must not take itself for a task of Slurm's.
for name in $(compgen -e); do
    [[ $name =~ ^(SLURM|PMI|PMIX|OMPI|MPI|PRTE)D?_ ]] && unset "$name"
done
ulimit -Sn "$(ulimit -Hn)" 2>/dev/null
export PYTHONPATH=$FP8_NEMO_CODE${PYTHONPATH:+:$PYTHONPATH} RAY_ENABLE_UV_RUN_RUNTIME_ENV=0

# Ray keeps its files in one folder of a host, and cannot start where another user's lie: each attempt
# has its own, the same on all of its nodes, short because sockets lie in it. Ray 2.60 would look for a
# raylet for 30 seconds that the same TERM has ended.
ray_folder=${RAY_TMPDIR:-/tmp}/fp8-nemo-${attempt##*/job-}
(umask 077 && mkdir -p "$ray_folder") || { stage="$ray_folder cannot be made, RAY_TMPDIR names its parent,"; exit 1; }
export RAY_TMPDIR=$ray_folder RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
export FP8_NEMO_RAY=$ray_folder:$me # what Ray starts here has it, and no other node's that shares a host
# The log is a file: a bar's line every 30 seconds at most, Ray's prefixes plain. (Under TQDM_DISABLE vLLM 0.25.1
# divides by the zero seconds of a bar that is not shown.)
export TQDM_MININTERVAL=${TQDM_MININTERVAL:-30} RAY_COLOR_PREFIX=${RAY_COLOR_PREFIX:-0}
python=("$FP8_NEMO_PYTHON" -P) # never the folder that the job was submitted from

start_ray() { # with the options that differ between head and others
    "${python[@]}" -m ray.scripts.scripts start "$@" --block --disable-usage-stats \
        --num-cpus="$cpus" --resources="{\"slurm_managed_ray_cluster\": 1, \"slurm-$me\": 1}" \
        --node-manager-port=$((port + 1)) --object-manager-port=$((port + 2)) \
        --runtime-env-agent-port=$((port + 3)) --dashboard-agent-grpc-port=$((port + 4)) \
        --dashboard-agent-listen-port=$((port + 5)) --metrics-export-port=$((port + 6)) \
        --min-worker-port="$worker_port" --max-worker-port=$((worker_port + workers - 1)) \
        >"$attempt/ray-$me.log" 2>&1 &
    ray=$!
}

ray_ended() {
    local part # which of its processes, each once, with its exit code
    part=$(sed -nE 's/.* END ([a-z_]+)\..* \((exit code.*)\) -----/, \1 \2/p' "$attempt/ray-$me.log" | sort -u | tr -d '\n')
    [[ -n $part ]] || part=$(sed -nE 's/^([A-Za-z.]*Error: .*)/, \1/p' "$attempt/ray-$me.log" | tail -n 1)
    stage="Ray (see $attempt/ray-$me.log$part)"
    exit 1
}

watch() { # until process $1 ends or the attempt is over
    local asked=
    while kill -0 "$1" 2>/dev/null && ! over; do
        # The TERM that ends a step reaches Ray too, and Ray ends first: the run may still save.
        kill -0 "$ray" 2>/dev/null || [[ -e $attempt/term ]] || ray_ended
        if [[ -e $attempt/stop && -z $asked && -n ${driver-} ]]; then
            [[ $stage == "the run" ]] || { stage="$stage, cut short by the end of the job,"; exit 1; }
            asked=yes
            kill -USR1 "$driver"
        fi
        pause
    done
}

if ((rank > 0)); then
    stage="waiting for Ray's head on ${nodes[0]}"
    for ((waited = 0; waited < FP8_NEMO_JOIN_TIMEOUT; waited++)); do
        [[ -e $attempt/head ]] && break
        over && exit
        pause
    done
    [[ -e $attempt/head ]] || exit 1
    start_ray --address="$(<"$attempt/head")"
    watch "$ray"
    while [[ -e $attempt/term ]] && ! over; do pause; done
    over || ray_ended
    exit
fi

stage="asking Ray for this node's address"
ip=$("${python[@]}" -c 'import ray.util; print(ray.util.get_node_ip_address())') || exit
client=() # its server is there with `ray[client]` alone
"${python[@]}" -c 'import grpc' 2>/dev/null && client=(--ray-client-server-port=$((port + 7)))
start_ray --head --node-ip-address="$ip" --port="$port" "${client[@]}" --include-dashboard=false
export RAY_ADDRESS=$ip:$port
echo "$RAY_ADDRESS" >"$attempt/head.new" && mv "$attempt/head.new" "$attempt/head"

in_front() { # a command that the job's end ends too
    # Slurm has told all that ran, and what begins now would not know: the attempt is over.
    [[ -e $attempt/term ]] && touch "$attempt/ended" && exit 143
    "$@" &
    driver=$!
    watch "$driver"
    over && exit 1
    wait "$driver"
    local code=$?
    driver=
    return "$code"
}
stage="waiting for the nodes"
in_front "${python[@]}" -m fp8_nemo.launch.ray_cluster wait "$FP8_NEMO_JOIN_TIMEOUT" "${nodes[@]}" || exit
if ((FP8_NEMO_PREFLIGHT)); then
    stage="recipes.check_cluster"
    in_front "${python[@]}" -m fp8_nemo.recipes.check_cluster "$run_dir" || exit
fi
stage="waiting for the attempt before this one, which holds $run_dir/.lock,"
flock --wait 120 "$run_dir/.lock" true || exit
stage="the run"
in_front "${python[@]}" -m fp8_nemo.recipes.run "$run_dir"
code=$?
echo "$code" >"$attempt/code"
if ((code)) && [[ ! -e $attempt/stop && ! -e $attempt/term ]]; then
    missing=$("${python[@]}" -m fp8_nemo.launch.ray_cluster wait 0 "${nodes[@]}" 2>/dev/null) ||
        { [[ -n $missing ]] && echo "$missing" >"$attempt/lost"; }
fi
exit "$code"
