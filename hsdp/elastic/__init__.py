"""Replicas that come and go: each is a job of its own, and torchft's manager says who takes part in a step.

    from torchft import Manager, ProcessGroupGloo

    group = elastic.BoundedGroup(ProcessGroupGloo, timeout=patience / 3)
    manager = Manager(pg=group, load_state_dict=None, state_dict=None, min_replica_size=1, timeout=patience)
    fully_shard(model, mesh=init_device_mesh("cuda", (shards,)))   # the ranks of this job: one replica
    optimizer = elastic.ElasticOptimizer(manager, model, torch.optim.AdamW(model.parameters()))
    while manager.current_step() < steps:
        optimizer.zero_grad()                                      # the step begins: who takes part is asked meanwhile
        loss_of(model(batches[elastic.batch_index(manager)])).backward()
        if optimizer.step():                                       # False: the step was dropped, on all that remain
            ...

manager.py      what hsdp asks of a manager; hsdp never imports torchft, whose `Manager` has it all
group.py        `BoundedGroup`: the manager's process group, formed within its time-out or not at all
reduce.py       `replicas`: the stage of the reduction pipeline whose all-reduces are the manager's
optimizer.py    `ElasticOptimizer`: a step that is done by all who take part, or dropped without a trace
buffers.py      what it puts back: what forwards of a dropped step wrote to buffers
healing.py      what a replica that joins gets: each of its ranks the shards of its counterpart in another replica
saving.py       checkpoints that one replica writes and any number of replicas loads
"""

from hsdp.elastic.group import BoundedGroup
from hsdp.elastic.manager import Manager, batch_index
from hsdp.elastic.optimizer import ElasticOptimizer
from hsdp.elastic.reduce import ManagedAllReduce, replicas
from hsdp.elastic.saving import resume, save

__all__ = ["BoundedGroup", "ElasticOptimizer", "ManagedAllReduce", "Manager", "batch_index", "replicas", "resume", "save"]
