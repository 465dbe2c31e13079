"""Everything that differs between vLLM releases, one module per thing that varies.

| module | what varies |
|---|---|
| `request` | how a Request is made, and where its block hasher comes from |
| `step` | whether a step is one call to the executor or two |
| `outputs` | what an update of the scheduler returns |
| `rows` | which rows of a forward pass are whose (in the worker) |
| `states` | how the state leaving a layer is read (in the worker) |

Each module lists its behaviours, and each behaviour says in `needs` and `unless` what of vLLM it stands on. A behaviour
is chosen by looking for those symbols, never by a version number. A new release's difference is a new behaviour here.
"""
