#!/usr/bin/env bash
# FMS's run_benchmarks.sh, with its positional order and its environment variables:
#
#   bash scripts/run_benchmarks.sh NUM_GPUS_MATRIX RESULT_DIR SCENARIOS_CONFIG SCENARIOS_FILTER
#   bash scripts/run_benchmarks.sh NUM_GPUS_MATRIX EFFECTIVE_BS_MATRIX RESULT_DIR ...   (its later order,
#                                  known by a second argument of numbers alone)
#
# Without arguments: a small representative set. SCENARIOS_FILTER "none" or "": all but slow ones.
# DRY_RUN, NO_DATA_PROCESSING, NO_OVERWRITE=true|false; MEMORY_LOGGING=huggingface|nvidia|all.
# For nvidia-smi: NVIDIA_SMI_KEYWORDS (timestamp,name,index,memory.used), NVIDIA_SMI_INTERVAL (1, in seconds).
# Results are never deleted: those of an earlier run are moved aside once the new plan is known to be
# sound, with NO_OVERWRITE=true refused. A folder that holds anything else is left alone.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
fail() { echo "run_benchmarks.sh: $*" >&2; exit 2; }

true_or_false() { # NAME VALUE
    case "$2" in true | false) ;; *) fail "$1 must be true or false; got '$2'" ;; esac
}

dry_run=${DRY_RUN:-false}
no_data=${NO_DATA_PROCESSING:-false}
no_overwrite=${NO_OVERWRITE:-false}
memory=${MEMORY_LOGGING:-huggingface}
true_or_false DRY_RUN "$dry_run"
true_or_false NO_DATA_PROCESSING "$no_data"
true_or_false NO_OVERWRITE "$no_overwrite"

small=lora # of scenarios/scenarios.yaml
[ "$#" -eq 0 ] || small=
gpus=${1-}
batches=
case "${2-}" in
'' | *[!0-9\ ]*) ;;
*) batches=$2 && shift ;;
esac
results=${2:-benchmark_outputs}
scenarios=${3:-scenarios.yaml}
filter=${4-$small}
[ "$filter" != none ] || filter=

if [ ! -f "$scenarios" ]; then
    beside="$here/../scenarios/$scenarios"
    [ -f "$beside" ] || fail "no scenarios at $scenarios"
    scenarios=$beside
fi
# Scenarios are a file; a folder to put results in that is one, is an argument in the wrong place.
[ ! -f "$results" ] || fail "RESULT_DIR is the file $results; the order is NUM_GPUS RESULT_DIR SCENARIOS"

flags=(--scenarios_config_path "$scenarios" --results_output_path "$results" --preload_models)
# shellcheck disable=SC2206  numbers, to be split
{
    [ -z "$gpus" ] || flags+=(--num_gpus_matrix $gpus)
    [ -z "$batches" ] || flags+=(--effective_batch_size_matrix $batches)
    [ -z "$filter" ] || flags+=(--run_only_scenarios $filter)
}
[ "$no_data" = false ] || flags+=(--no_data_processing)
case "$memory" in
huggingface) flags+=(--log_memory_hf) ;;
nvidia) flags+=(--log_nvidia_smi) ;;
all) flags+=(--log_memory_hf --log_nvidia_smi) ;;
*) fail "MEMORY_LOGGING must be huggingface, nvidia or all; got '$memory'" ;;
esac

[ -z "${NVIDIA_SMI_KEYWORDS-}" ] || flags+=(--nvidia_smi_keywords "$NVIDIA_SMI_KEYWORDS")
[ -z "${NVIDIA_SMI_INTERVAL-}" ] || flags+=(--nvidia_smi_interval "$NVIDIA_SMI_INTERVAL")

python=${PYTHON:-python}
if [ "$dry_run" = true ]; then
    exec "$python" "$here/benchmark.py" "${flags[@]}" --dry_run
fi
if [ -d "$results" ] && [ -n "$(ls -A "$results")" ]; then
    [ "$no_overwrite" = false ] || fail "$results is not empty, and NO_OVERWRITE=true"
    is_ours=false
    for one in "$results"/plan.json "$results"/script.json "$results"/exp_*; do
        [ ! -e "$one" ] || is_ours=true
    done
    [ "$is_ours" = true ] || fail "$results is not empty and holds no results; name another RESULT_DIR"
    # Not `mv`: a cell that still runs would write into the results that take their place.
    flags+=(--move_aside)
fi

status=0
"$python" "$here/benchmark.py" "${flags[@]}" || status=$?
if [ -f "$results/plan.json" ]; then
    "$python" -m ergmeter bench report "$results" # benchmarks.csv and raw_summary.csv are there
fi
exit "$status"
