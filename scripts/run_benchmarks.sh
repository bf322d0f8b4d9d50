#!/usr/bin/env bash
# FMS's run_benchmarks.sh, with its positional order and its environment variables:
#
#   bash scripts/run_benchmarks.sh NUM_GPUS_MATRIX RESULT_DIR SCENARIOS_CONFIG SCENARIOS_FILTER
#   bash scripts/run_benchmarks.sh NUM_GPUS_MATRIX EFFECTIVE_BS_MATRIX RESULT_DIR ...   (its later order,
#                                  known by a second argument of numbers alone)
#
# Two options, anywhere among these: --command TEXT, what every cell runs (`erg train`, or such as
# '/path/of/python -m tuning.sft_trainer {arguments}'), and --contents FILE, the CONTENTS.yaml.
# Scenarios that name no command run sft_trainer. Where no Python here has fms-hf-tuning, it is put into
# .venv-fms first, from the package index.
#
# Without arguments: a small representative set. RESULT_DIR is benchmark_outputs where it is not given.
# SCENARIOS_FILTER: names; "none", "" or not given: all but slow ones.
# DRY_RUN, NO_DATA_PROCESSING, NO_OVERWRITE=true|false; MEMORY_LOGGING=huggingface|nvidia|all.
# CONTENTS.yaml is looked for beside the scenarios and in ../../sample-configurations of them,
# accelerate.yaml beside the scenarios and then in ../scenarios of this script.
# For nvidia-smi: NVIDIA_SMI_KEYWORDS (timestamp,name,index,memory.used), NVIDIA_SMI_INTERVAL (1, in seconds).
# Results are never deleted: those of an earlier run are moved aside once the new plan is known to be
# sound. With NO_OVERWRITE=true the script goes on with them: nothing done runs again, what is new is
# added. A folder that holds anything else is left alone. Exits with 1 if a cell failed.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
fail() { echo "run_benchmarks.sh: $*" >&2; exit 2; }

order="the order is NUM_GPUS RESULT_DIR SCENARIOS FILTER"
later="NUM_GPUS BATCHES RESULT_DIR SCENARIOS FILTER"
words=() options=()
while [ "$#" -gt 0 ]; do
    case "$1" in
    -h | --help)
        sed -n '2,/^set -eu/s/^# \{0,1\}//p' "$0"
        exit 0
        ;;
    --command | --contents)
        [ "$#" -gt 1 ] || fail "$1 needs a value"
        options+=("$1" "$2")
        shift
        ;;
    --command=* | --contents=*) options+=("$1") ;;
    -*) fail "takes the options --command and --contents; got '$1'; $order; see --help" ;;
    *) words+=("$1") ;;
    esac
    shift
done
set -- ${words[@]+"${words[@]}"}

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
case "$gpus" in
*[!0-9\ ]*) fail "NUM_GPUS_MATRIX takes numbers with spaces between them, such as '1 2'; got '$gpus'" ;;
esac
batches=
case "${2-}" in
'' | *[!0-9\ ]*) ;;
*) batches=$2 && shift ;;
esac
[ "$#" -le 4 ] || fail "too many arguments from '$5' on; $order, or $later; quote lists, as in '1 2'"
results=${2:-benchmark_outputs}
scenarios=${3:-scenarios.yaml}
filter=${4-$small}
[ "$filter" != none ] || filter=

# Scenarios are a file; a folder to put results in that is one, is an argument in the wrong place.
[ ! -f "$results" ] ||
    fail "RESULT_DIR is the file $results; $order"
if [ ! -f "$scenarios" ]; then
    beside="$here/../scenarios/$scenarios"
    [ ! -d "$scenarios" ] ||
        fail "SCENARIOS_CONFIG is the folder $scenarios; $order"
    [ -f "$beside" ] ||
        fail "no scenarios at $scenarios; $order"
    scenarios=$beside
fi

# A list without its quotes is another argument: this line shows what became of each.
echo "run_benchmarks.sh: GPUs ${gpus:-as in the scenarios}; effective batch ${batches:-as in the scenarios};" \
    "scenarios ${filter:-all but slow ones} of $scenarios; results in $results" >&2

flags=(--scenarios_config_path "$scenarios" --results_output_path "$results" --preload_models)
flags+=(--install_sft_trainer ${options[@]+"${options[@]}"})
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
    is_ours=false
    for one in "$results"/plan.json "$results"/script.json "$results"/exp_*; do
        [ ! -e "$one" ] || is_ours=true
    done
    [ "$is_ours" = true ] || fail "$results is not empty and holds no results; name another RESULT_DIR"
    if [ "$no_overwrite" = true ]; then
        [ -f "$results/plan.json" ] || fail "$results has no plan.json to go on with, and NO_OVERWRITE=true"
    else
        # Not `mv`: a cell that still runs would write into the results that take their place.
        flags+=(--move_aside)
    fi
fi

status=0
"$python" "$here/benchmark.py" "${flags[@]}" || status=$?
[ "$status" != 130 ] || echo "NO_OVERWRITE=true and the same arguments go on with $results" >&2
if [ -f "$results/plan.json" ]; then
    "$python" -m ergmeter bench report "$results" # benchmarks.csv and raw_summary.csv are there
fi
exit "$status"
