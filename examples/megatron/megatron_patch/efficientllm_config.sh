# The four variables of the EfficientLLM metrics, at their defaults, and one of ours. Before the training:
#
#     source examples/megatron/megatron_patch/efficientllm_config.sh

# true or false; anything else counts as false, and is remarked on.
export EFFICIENTLLM_METRICS_ENABLED=${EFFICIENTLLM_METRICS_ENABLED:-true}

# Seconds between readings of the devices, at the most. They are read ten times a second anyway.
export EFFICIENTLLM_COLLECTION_INTERVAL=${EFFICIENTLLM_COLLECTION_INTERVAL:-1.0}

# How many iteration times are kept in memory. No figure depends on it.
export EFFICIENTLLM_HISTORY_SIZE=${EFFICIENTLLM_HISTORY_SIZE:-1000}

# Iterations from one block on the console to the next.
export EFFICIENTLLM_LOG_INTERVAL=${EFFICIENTLLM_LOG_INTERVAL:-10}

# Iterations that torch's profiler looks at, after the first 11, for AL's two parts. 0: none.
export EFFICIENTLLM_PROFILE_STEPS=${EFFICIENTLLM_PROFILE_STEPS:-0}
