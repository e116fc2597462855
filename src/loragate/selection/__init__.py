"""Which variant of an adapter to use: train gates, evaluate the variants on a dev set, choose one by one rule.

settings   how the dev set is asked and judged; torch-free
select     the rule, from scores alone; torch-free
dev        dev and retention sets as tasks of an evaluation, and what may not be among them
trials     a range, objective and seed to train gates with; training one and keeping it
calibrate  trials → `evaluate` → `select` → save: `loragate calibrate` and `loragate.calibrate`
sweep      the same over a grid, in sequence or on Ray (on_ray); its cells as variants of an evaluation
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
