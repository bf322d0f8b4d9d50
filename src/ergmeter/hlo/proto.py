"""Field numbers of XLA's hlo.proto, and how each opcode is handled."""

from __future__ import annotations

MODULE_NAME, MODULE_ENTRY_NAME, MODULE_COMPUTATION, MODULE_ENTRY_ID, MODULE_PAYLOAD = 1, 2, 3, 6, 22
COMPUTATION_NAME, COMPUTATION_INSTRUCTION, COMPUTATION_ID, COMPUTATION_ROOT_ID = 1, 2, 5, 6
NAME, OPCODE, SHAPE, LITERAL, PARAMETER_NUMBER, TUPLE_INDEX = 1, 2, 3, 8, 9, 13
WINDOW, CONVOLUTION_DIMENSIONS, CUSTOM_CALL_TARGET, DOT_DIMENSIONS = 15, 16, 28, 30
ID, OPERAND_IDS, CALLED_IDS, BACKEND_CONFIG = 35, 36, 38, 43
FEATURE_GROUPS, BATCH_GROUPS, COMPARISON_DIRECTION = 50, 58, 63
RAGGED_DIMENSIONS, BACKEND_CONFIG_PAYLOAD = 90, 99
FFT_TYPE, FFT_LENGTH, INSTRUCTION_SHARDING = 31, 32, 40
SHAPE_TYPE, SHAPE_DIMENSIONS, SHAPE_PARTS = 2, 3, 4

# How an instruction is handled, by its opcode; the same lists are in scan.c.
DOT, SPECIAL, APPLYING, QUIET, OTHER = range(5)
KINDS = {
    b"dot": DOT,
    # Opcodes that need more than a list of their callees.
    **dict.fromkeys(
        b"scaled-dot convolution ragged-dot custom-call while conditional "
        b"cholesky triangular-solve fft".split(),
        SPECIAL,
    ),
    # Their callee is applied to scalar elements, so it has no products.
    **dict.fromkeys(
        b"map reduce reduce-window scatter select-and-scatter sort all-reduce all-reduce-start "
        b"reduce-scatter".split(),
        APPLYING,
    ),
    # Opcodes that call nothing; the last two only refer to the callee of their async-start.
    **dict.fromkeys(
        b"parameter constant add multiply subtract divide negate broadcast reshape transpose "
        b"convert select compare exponential log rsqrt sqrt power tanh maximum minimum and or not "
        b"slice concatenate pad iota tuple get-tuple-element copy bitcast dynamic-slice "
        b"dynamic-update-slice gather reverse async-update async-done".split(),
        QUIET,
    ),
}
QUIET_OPCODES = frozenset(opcode for opcode, kind in KINDS.items() if kind == QUIET)
