"""From shards of all ranks to whole tensors under the reference's names: replicas, places, padding."""
