"""Everything that touches the private parts of torch's FSDP2; no other module of mmfsdp does.

torch has one parameter group per shard unit. A group registers either its shards or their gathered copies in the
modules, and reduces its gradients in backward. The names exist in torch 2.9 to 2.15; `check_private_names` looks
for them when a process first shards a model.

| module | parts that it touches |
|---|---|
| `param_groups` | the groups of a model, and the parameters, modules and names of a group |
| `gathering` | gathered copies: making, freeing and finding them |
| `observing` | the fixed points of a group at which other modules are called |
| `unreduced` | gradients that are still to be reduced |
| `iterations` | the root, and what torch keeps between the forwards and backwards of a step |
| `unit_hooks` | the hooks around a unit's forward |
| `state_dict_hooks` | the hooks that free gathered copies for ``state_dict()`` |
| `random_numbers` | how DTensor draws random numbers for shards in CPU memory |
| `private_names` | whether this torch has the names that the others use |
"""
