"""Many trainings of gates: any grid of ranges × seeds × adapters × objectives, on Ray or one after the other.

    plan        which trials there are, and the identity file that a resumed sweep is compared with
    records     the files of one trial; its result.json, written last, is what makes it finished
    trials      runs trials in one process, with one base for all of them
    sequential  in this process
    ray_tune    in worker processes of Ray (the only file that imports ray)
    watch       where every trial stands, read from its files
    outcome     from results to cells, the choice on the probe and the oracle on the test set

The files are the truth, whoever runs: what is finished is never run again, by either runner.
"""

from loragate.sweep.plan import SweepPlan, Trial

__all__ = ["SweepPlan", "Trial"]
