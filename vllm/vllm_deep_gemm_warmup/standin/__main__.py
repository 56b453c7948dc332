"""``python -m vllm_deep_gemm_warmup.standin --device h100 -- vllm serve MODEL``."""

import sys

from .launcher import main

sys.exit(main())
