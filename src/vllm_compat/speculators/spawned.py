"""``__mp_main__`` of a process that a script of ours spawned: the script's own top level, with our generator in place.

multiprocessing runs this module there, because ``script.run_script`` names it as where ``__main__`` came from.
"""

import os
import sys

if __name__ == "__mp_main__":
    from vllm_compat.speculators.replaced import Replacement
    from vllm_compat.speculators.script import SCRIPT, code_of

    sys.meta_path.insert(0, Replacement())
    exec(code_of(os.environ[SCRIPT]))
