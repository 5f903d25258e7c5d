#!/usr/bin/env bash
# The baseline and the Ray training in the cluster of install-ray.sh, and their comparison. The scripts are those of
# examples/parallel-training as they lie here. The baseline runs in a worker's pod: it has what one worker has. If that
# pod goes, the baseline is started again and goes on from what it has saved, as the training on Ray does by itself.
#
#   EPOCHS=5 BATCH_SIZE=128    of both trainings; the batch is that of all workers together
#   IMAGES=4096 TEST_IMAGES=1024   how many; all of CIFAR-10 are 50000 and 10000, for which TIMEOUT_S is too short
#   WORKERS=2                  or several numbers, such as WORKERS="1 2"
#   TRAINING_ARGS=             more options of both, such as "--data generated --filters 16"
#   PREEMPT_AT=                train on Ray once more, and delete the pod of a worker at this step
#   REQUIRE_TARGETS=           1: fail also where a speedup is below its target; the accuracy has to be right in any case
#   RESULTS=results            folder of this machine for what comes back; results of an earlier run there are removed
#   TIMEOUT_S=7200             for each training
#   KUBE_CONTEXT=holdfast      the cluster, as kubectl calls it
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
no_arguments "$@"

EPOCHS=${EPOCHS:-5} IMAGES=${IMAGES:-4096} TEST_IMAGES=${TEST_IMAGES:-1024}
BATCH_SIZE=${BATCH_SIZE:-128} WORKERS=${WORKERS:-2} PREEMPT_AT=${PREEMPT_AT:-} REQUIRE_TARGETS=${REQUIRE_TARGETS:-}
TRAINING_ARGS=${TRAINING_ARGS:-} RESULTS=${RESULTS:-$ROOT/results} TIMEOUT_S=${TIMEOUT_S:-7200} POLL_S=${POLL_S:-2}
whole EPOCHS 1
whole BATCH_SIZE 1
whole IMAGES 16
whole TEST_IMAGES 16
whole TIMEOUT_S 1
[ -z "$PREEMPT_AT" ] || whole PREEMPT_AT 1
[[ $REQUIRE_TARGETS =~ ^[01]?$ ]] || die "REQUIRE_TARGETS=$REQUIRE_TARGETS is not accepted: it must be 1, or 0"
read -r -a groups <<<"${WORKERS//,/ }"
((${#groups[@]})) || die "WORKERS is empty: it must be one or several whole numbers"
most=0
for WORKERS in "${groups[@]}"; do
    whole WORKERS 1
    ((BATCH_SIZE % WORKERS == 0)) ||
        die "BATCH_SIZE=$BATCH_SIZE is not accepted with $WORKERS workers: it must be a multiple of that"
    ((WORKERS <= most)) || most=$WORKERS
done
read -r -a more <<<"$TRAINING_ARGS"
for word in ${more[@]+"${more[@]}"}; do
    case ${word%%=*} in
        --epochs | --batch-size | --images | --test-images)
            die "TRAINING_ARGS=\"$TRAINING_ARGS\" is not accepted: ${word%%=*} has a variable of its own, one of EPOCHS," \
                "BATCH_SIZE, IMAGES and TEST_IMAGES"
            ;;
    esac
done
# One image in eight is for validation; the last batch may be smaller.
steps=$((EPOCHS * ((IMAGES - IMAGES / 8 + BATCH_SIZE - 1) / BATCH_SIZE)))
[ -z "$PREEMPT_AT" ] || ((PREEMPT_AT < steps)) ||
    die "PREEMPT_AT=$PREEMPT_AT is not accepted: it must be below $steps, the last step"
if [ -e "$RESULTS/interrupted" ] && [ ! -e "$RESULTS/interrupted/.benchmark" ]; then
    die "RESULTS=$RESULTS is not accepted: this script removes interrupted there, and no benchmark has made it; name" \
        "another folder, or move it away"
fi

need kubectl
reach_cluster

# ---------------------------------------------------------------- the cluster
in_namespace() { k -n "$NAMESPACE" "$@"; }
have=$(in_namespace get "raycluster/$CLUSTER" --output jsonpath='{.spec.workerGroupSpecs[0].replicas}') ||
    die "there is no Ray cluster '$CLUSTER': run install-ray.sh first"
grows=$(in_namespace get "raycluster/$CLUSTER" --output jsonpath='{.spec.enableInTreeAutoscaling}')
cpus=$(in_namespace get "raycluster/$CLUSTER" \
    --output jsonpath='{.spec.workerGroupSpecs[0].template.spec.containers[0].resources.limits.cpu}')
[[ $cpus =~ ^[1-9][0-9]*$ ]] || cpus=1
gpus=$(in_namespace get "raycluster/$CLUSTER" \
    --output jsonpath='{.spec.workerGroupSpecs[0].template.spec.containers[0].resources.limits.nvidia\.com/gpu}')
[[ $gpus =~ ^[1-9][0-9]*$ ]] && gpus=1 || gpus=0 # one for each process
if ((have < most)) && [ "$grows" != true ]; then
    say "$most workers instead of $have"
    in_namespace patch "raycluster/$CLUSTER" --type json --patch "[
        {\"op\": \"replace\", \"path\": \"/spec/workerGroupSpecs/0/maxReplicas\", \"value\": $((most > 4 ? most : 4))},
        {\"op\": \"replace\", \"path\": \"/spec/workerGroupSpecs/0/replicas\", \"value\": $most}]"
    have=$most
fi
if [ "$grows" != true ] && ! in_namespace wait "raycluster/$CLUSTER" --timeout=300s \
    --for=jsonpath='{.status.readyWorkerReplicas}'="$have"; then
    show_pods
    die "the cluster does not have $have workers that are ready. The pods and their events are above; see" \
        "examples/parallel-training/TROUBLESHOOTING.md"
fi
head=$(in_namespace get pods --selector "ray.io/cluster=$CLUSTER,ray.io/node-type=head" \
    --field-selector status.phase=Running --output jsonpath='{.items[0].metadata.name}') ||
    die "the pod of the head does not run: 'kubectl -n $NAMESPACE get pods' says more"
on_head() { in_namespace exec "$@"; } # OPTION… POD -c ray-head -- COMMAND…
from_head() { on_head "$head" -c ray-head -- "$@"; }

# ---------------------------------------------------------------- the scripts
run=benchmark-$(date -u +%Y%m%d-%H%M%S)-$$
there=/results/$run
code=$ROOT/examples/parallel-training
[ -f "$code/ray_training.py" ] || die "$code/ray_training.py is not there"
send() { (cd "$code" && tar -cf - ./*.py) | on_head -i "$head" -c ray-head -- sh -c "mkdir -p $there/code && tar -xf - -C $there/code"; }
retry 3 send || die "the scripts cannot be copied into the cluster"
mkdir -p "$RESULTS"
# What is there of an earlier run must not be taken for this one's.
rm -rf "${RESULTS:?}/interrupted"
rm -f "$RESULTS"/{baseline_results,comparison}.json "$RESULTS"/{ray_results,ceiling}_*workers.json \
    "$RESULTS"/{training_curves,speedup,epoch_time}.png "$RESULTS"/{baseline,baseline-[0-9],comparison}.log \
    "$RESULTS"/{ray,ceiling}-*workers*.log "$RESULTS/.preempted"
if [ -n "$PREEMPT_AT" ]; then
    mkdir "$RESULTS/interrupted"
    : >"$RESULTS/interrupted/.benchmark" # the next one may remove it, and so may make benchmark
fi

# ---------------------------------------------------------------- jobs
job='' watcher=''
# shellcheck disable=SC2329 # called by the trap
stop() {
    [ -z "$watcher" ] || kill "$watcher" 2>/dev/null || true
    if [ -n "$job" ]; then
        say "stopping the job $job"
        from_head ray job stop --no-wait "$job" >/dev/null 2>&1 || true
    fi
}
trap stop EXIT

export_to_job=(env "KERAS_HOME=/results/keras" "PYTHONUNBUFFERED=1" "RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265")
# Status and exit code. Asked without Ray's own command line, which takes seconds of a CPU that the training needs.
status_of() {
    from_head python -c "import json, urllib.request as u
job = json.load(u.urlopen('http://127.0.0.1:8265/api/jobs/$1', timeout=30))
print(job['status'], job.get('driver_exit_code'))"
}

exit_code=0 TRIES=1 ACCEPTED=0
# run_job NAME CPUS GPUS COMMAND…: in the cluster, with its log here and in the results. The exit code of the command goes
# to exit_code. With TRIES, a command that ends otherwise is started again, so many times in all; with ACCEPTED, that exit
# code is no failure.
run_job() {
    local name=$1 cpus=$2 gpus=$3 log=$RESULTS/$1.log answer status until=$((SECONDS + TIMEOUT_S)) shown=0 try=1
    shift 3
    say "$name: $*"
    while true; do
        if [ -z "$job" ]; then
            job=$run-$name-$try
            from_head env RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 ray job submit --no-wait --submission-id "$job" \
                --entrypoint-num-cpus "$cpus" --entrypoint-num-gpus "$gpus" -- "${export_to_job[@]}" "$@" >"$log" 2>&1 || {
                job=''
                cat "$log" >&2
                die "$name cannot be submitted"
            }
        fi
        from_head env RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265 timeout "$((until > SECONDS ? until - SECONDS : 1))" \
            ray job logs --follow --log-color false "$job" |
            tee "$log" | tail -n "+$((shown + 1))" || true
        answer=$(retry 5 status_of "$job") || die "$name: the head does not say how the job ended"
        read -r status exit_code <<<"$answer"
        case $status in
            SUCCEEDED) break ;;
            FAILED)
                job=''
                [ "$exit_code" != "$ACCEPTED" ] || break
                # 2: it has refused what it was told, and would do so again.
                if ((try >= TRIES)) || [ "$exit_code" = 2 ] || ((SECONDS >= until)); then
                    die "$name ended as $status, with the exit code $exit_code. Its log: $log"
                fi
                mv "$log" "$RESULTS/$name-$try.log"
                try=$((try + 1)) shown=0
                warn "$name ended with the exit code $exit_code: the same command again, try $try of $TRIES. It goes on" \
                    "from what it has saved"
                sleep "$POLL_S"
                ;;
            PENDING | RUNNING)
                ((SECONDS < until)) || die "$name: it still runs after $TIMEOUT_S s. TIMEOUT_S gives it longer"
                warn "$name: the log broke off and is read again"
                shown=$(wc -l <"$log")
                sleep "$POLL_S"
                ;;
            *)
                job=''
                die "$name ended as $status. Its log: $log"
                ;;
        esac
    done
    job=''
}

# preempt STORAGE: once the training is at the step, delete the pod of its last worker, as a node that goes away would.
preempt() {
    local step pod
    while true; do
        sleep "$POLL_S"
        # Silent: once the training has ended, this one is stopped in the middle.
        step=$(from_head sh -c "find $1 -name training_progress.json -exec cat {} + 2>/dev/null" 2>/dev/null |
            sed -n 's/.*"step": *\([0-9][0-9]*\).*/\1/p' | sort -n | tail -n 1) || true
        if [ -n "$step" ] && ((step >= PREEMPT_AT)); then break; fi
    done
    trap '' TERM # not half of what follows
    # The name of a pod is that of its host.
    pod=$(from_head python "$there/code/interruption.py" host "$1/holdfast")
    say "step $step: deleting the pod of a worker, $pod"
    in_namespace delete pod "$pod" --wait=false
    printf '%s\n' "$step" >"$RESULTS/.preempted"
}

# ---------------------------------------------------------------- the trainings
options=(--epochs "$EPOCHS" --batch-size "$BATCH_SIZE" --images "$IMAGES" --test-images "$TEST_IMAGES" --cpus "$cpus"
    --gpus "$gpus" ${more[@]+"${more[@]}"})
# A pod that is told to stop makes the file of this name: raycluster.yaml. The name of the pod is put in by Ray's shell.
# shellcheck disable=SC2016
leaving='HOLDFAST_NOTICE_FILE=/tmp/leaving-$HOSTNAME'
TRIES=3 run_job baseline "$cpus" "$gpus" env HOLDFAST_ENABLED=1 "HOLDFAST_DIR=$there/baseline" "$leaving" \
    python "$there/code/baseline_training.py" --save-path "$there" "${options[@]}"
train_on() { # WORKERS NAME FOLDER VARIABLE…
    local workers=$1 name=$2 folder=$3
    shift 3
    run_job "$name" 0 0 env ${@+"$@"} python "$there/code/ray_training.py" --save-path "$folder" "${options[@]}" \
        --num-workers "$workers" --address auto --storage-path "$there/ray" --run-name "$name" --cluster-timeout 300
}
missed=''
for workers in "${groups[@]}"; do
    train_on "$workers" "ray-${workers}workers" "$there"
    run_job "ceiling-${workers}workers" 0 0 python "$there/code/ceiling.py" --save-path "$there" "${options[@]}" \
        --num-workers "$workers" --address auto
    [ -n "$PREEMPT_AT" ] || continue
    # The same again, with a worker that goes: the comparison shows what it cost.
    name=ray-${workers}workers-interrupted
    rm -f "$RESULTS/.preempted"
    preempt "$there/ray/$name" &
    watcher=$!
    train_on "$workers" "$name" "$there/interrupted" HOLDFAST_PROGRESS_EVERY=1
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    watcher=''
    if [ ! -f "$RESULTS/.preempted" ]; then
        missed="the training ended before that step, or no pod could be deleted: nothing was preempted"
    elif ! from_head python "$there/code/interruption.py" note "$there/interrupted/ray_results_${workers}workers.json" \
        "$there/ray/$name/holdfast"; then
        missed="the training ended before it was interrupted; take an earlier step"
    fi
    rm -f "$RESULTS/.preempted"
done
required=()
[ "$REQUIRE_TARGETS" != 1 ] || required=(--require-targets)
ACCEPTED=1 run_job comparison 0 0 python "$there/code/compare.py" --save-path "$there" ${required[@]+"${required[@]}"}
targets_missed=$exit_code

# ---------------------------------------------------------------- back
fetch() {
    from_head tar -C "$there" --exclude=./code --exclude=./ray --exclude=./baseline -cf - . | tar -xf - -C "$RESULTS"
}
retry 3 fetch || die "the results cannot be copied out of the cluster; they lie in $there of its pods"
[ -f "$RESULTS/comparison.json" ] || die "there is no comparison.json among the results in $RESULTS"
if [ "$targets_missed" = 1 ]; then
    why=$(grep -m 1 '^failed: ' "$RESULTS/comparison.log") ||
        die "comparison ended as FAILED, with the exit code 1. Its log: $RESULTS/comparison.log"
    die "a target was missed: ${why#failed: }. All results are in $RESULTS"
fi
[ -z "$missed" ] || die "PREEMPT_AT=$PREEMPT_AT: $missed. All else is in $RESULTS"
[ -z "$PREEMPT_AT" ] || from_head python "$there/code/interruption.py" check "$there/comparison.json" ||
    die "a training that was interrupted lost steps or ended with other weights: see 'interrupted' in" \
        "$RESULTS/comparison.json"
say "results: $RESULTS (checkpoints stay in the cluster, in $there)"
