"""All shards of a search together cover the whole search."""

from sim.search import PARTS, SearchRequest, random_shards, systematic_shards


def test_shards_cover_every_seed_once():
    shards = list(random_shards(SearchRequest((5, 11))))
    assert [seed for shard in shards for seed in range(shard.seeds[0], sum(shard.seeds))] == list(
        range(5, 16)
    )


def test_shards_of_a_systematic_search_differ():
    """``systematic`` is tested to split by ``part``; here each part occurs once."""
    shards = list(systematic_shards(SearchRequest((0, 1), ("save",), ("ckpt",), ("",)), 1))
    assert [shard.part for shard in shards] == [(part, PARTS) for part in range(PARTS)]
