#!/usr/bin/env bash
# Pretrains a Qwen2.5 on Megatron-LM with EfficientLLM's metrics. The arguments are those of
# Pai-Megatron-Patch's examples/qwen2_5/run_mcore_qwen.sh:
#
#   export MEGATRON_PATH=/path/to/Megatron-LM
#   ./run_mcore_qwen.sh dsw 7B 4 32 5e-5 5e-6 2048 2048 bf16 1 1 1 false false false false full \
#       false 500 /path/to/dataset /path/to/valid none 1000000 50000 /path/to/output
#
# TOKENIZER, GPUS_PER_NODE and PRETRAIN (a program that calls Megatron's pretrain) may be set too.
set -eu
fail() { echo "run_mcore_qwen.sh: $*" >&2; exit 2; }

[ $# -eq 25 ] || fail "25 arguments needed, got $#: see the first lines of $0"
[ -n "${MEGATRON_PATH:-}" ] || fail "set MEGATRON_PATH to the folder of Megatron-LM"
ENV=$1 SIZE=$2 BATCH=$3 GLOBAL_BATCH=$4 LR=$5 MIN_LR=$6 SEQ_LEN=$7 PRECISION=$9
shift 9 # the padded length is for fine-tuning
TP=$1 PP=$2 CP=$3 SP=$4 DO=$5 FLASH=$6 SFT=$7 AC=$8 OFFLOAD=$9
shift 9
SAVE_INTERVAL=$1 DATA=$2 CHECKPOINT=$4 TOKENS=$5 WARMUP_TOKENS=$6 OUTPUT=$7
PROGRAM=${PRETRAIN:-$MEGATRON_PATH/pretrain_gpt.py}
[ -d "$MEGATRON_PATH/megatron/training" ] || \
    fail "no Megatron-LM at MEGATRON_PATH=$MEGATRON_PATH: no folder megatron/training there"
[ -f "$PROGRAM" ] || fail "no program at $PROGRAM: set PRETRAIN"
command -v torchrun >/dev/null || fail "no torch here: torchrun is not on PATH"
[ "$SFT" = false ] && [ "$OFFLOAD" = false ] || fail "fine-tuning and offload are Pai-Megatron-Patch's"

# The folder with megatron_patch first: Pai-Megatron-Patch's own modules are still found.
FOLDER=$(cd "$(dirname "$0")" && pwd)
. "$FOLDER/megatron_patch/efficientllm_config.sh"
export PYTHONPATH=$FOLDER:$MEGATRON_PATH${PYTHONPATH:+:$PYTHONPATH}
export CUDA_DEVICE_MAX_CONNECTIONS=1

case $ENV in
dsw) RANKS="--nnodes 1 --master_addr localhost --master_port ${MASTER_PORT:-$(shuf -n 1 -i 10000-65535)}"
    [ -n "${GPUS_PER_NODE:-}" ] ||
        GPUS_PER_NODE=$(python -c "import torch; print(torch.cuda.device_count())" 2>/dev/null) ||
        fail "no torch here: python can't import it" ;;
dlc) RANKS="--nnodes $WORLD_SIZE --node_rank $RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
    GPUS_PER_NODE=${GPUS_PER_NODE:-$KUBERNETES_CONTAINER_RESOURCE_GPU} ;;
*) fail "environment $ENV: dsw or dlc" ;;
esac
[ "$GPUS_PER_NODE" != 0 ] || fail "no GPU here: set GPUS_PER_NODE to start that many ranks anyway"
[[ $GPUS_PER_NODE =~ ^[1-9][0-9]*$ ]] || fail "GPUS_PER_NODE is $GPUS_PER_NODE: must be 1 or more"

TIED=
case $SIZE in # layers, width, heads, width of the MLP, groups of keys and values, epsilon
0.5B) DIMENSIONS=(24 896 14 4864 2 1e-6) TIED=yes ;;
1.5B) DIMENSIONS=(28 1536 12 8960 2 1e-6) TIED=yes ;;
3B) DIMENSIONS=(36 2048 16 11008 2 1e-6) TIED=yes ;;
7B) DIMENSIONS=(28 3584 28 18944 4 1e-6) ;;
14B) DIMENSIONS=(48 5120 40 13824 8 1e-5) ;;
32B) DIMENSIONS=(64 5120 40 27648 8 1e-5) ;;
72B) DIMENSIONS=(80 8192 64 29568 8 1e-5) ;;
*) fail "no model $SIZE: 0.5B, 1.5B, 3B, 7B, 14B, 32B or 72B" ;;
esac

OPTIONS=()
[ -n "$TIED" ] || OPTIONS+=(--untie-embeddings-and-output-weights)
[ "$SP" = true ] && OPTIONS+=(--sequence-parallel)
[ "$DO" = true ] && OPTIONS+=(--use-distributed-optimizer)
[ "$FLASH" = true ] && OPTIONS+=(--attention-backend flash)
[ "$CHECKPOINT" = none ] || OPTIONS+=(--load "$CHECKPOINT")
case $PRECISION in
bf16 | fp16) OPTIONS+=("--$PRECISION") ;;
fp8) OPTIONS+=(--bf16 --fp8-format hybrid) ;;
*) fail "precision $PRECISION: bf16, fp16 or fp8" ;;
esac
case $AC in
full) OPTIONS+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1) ;;
sel) OPTIONS+=(--recompute-activations) ;;
none) ;;
*) fail "activation checkpointing $AC: full, sel or none" ;;
esac

iterations() { echo $(($1 / GLOBAL_BATCH / SEQ_LEN)); }
# shellcheck disable=SC2086
exec torchrun $RANKS --nproc_per_node "$GPUS_PER_NODE" \
    "$FOLDER/pretrain.py" "$PROGRAM" \
    --num-layers "${DIMENSIONS[0]}" --hidden-size "${DIMENSIONS[1]}" \
    --num-attention-heads "${DIMENSIONS[2]}" --ffn-hidden-size "${DIMENSIONS[3]}" \
    --group-query-attention --num-query-groups "${DIMENSIONS[4]}" \
    --swiglu --normalization RMSNorm --norm-epsilon "${DIMENSIONS[5]}" --disable-bias-linear --add-qkv-bias \
    --position-embedding-type rope --rotary-base 1000000 --attention-dropout 0 --hidden-dropout 0 \
    --micro-batch-size "$BATCH" --global-batch-size "$GLOBAL_BATCH" \
    --seq-length "$SEQ_LEN" --max-position-embeddings "$SEQ_LEN" \
    --train-iters "$(iterations "$TOKENS")" --lr-decay-iters "$(iterations "$TOKENS")" \
    --lr-warmup-iters "$(iterations "$WARMUP_TOKENS")" --lr "$LR" --min-lr "$MIN_LR" \
    --lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" \
    --context-parallel-size "$CP" --data-path "$DATA" --split 99,1,0 \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:-Qwen/Qwen2.5-$SIZE}" \
    --log-interval 1 --log-throughput --eval-interval 10000 --eval-iters 10 \
    --tensorboard-dir "$OUTPUT/tensorboard" --save "$OUTPUT/checkpoint" \
    --save-interval "$SAVE_INTERVAL" "${OPTIONS[@]}"
