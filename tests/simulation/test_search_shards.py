"""All shards of a search together cover the whole search."""

from sim.search import SearchRequest, random_shards


def test_shards_cover_every_seed_once():
    shards = list(random_shards(SearchRequest((5, 11))))
    assert [seed for shard in shards for seed in range(shard.seeds[0], sum(shard.seeds))] == list(
        range(5, 16)
    )
