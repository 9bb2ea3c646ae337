//! Orders of records against a second implementation, `tests/golden/orders.py`.

use super::{RecordOrder, WindowOrder, Windows};
use crate::ids::Epoch;
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    shards: Vec<u64>,
    seed: u64,
    epoch: u64,
    order: Vec<u64>,
    micro: Option<u32>,
    window: Option<u64>,
    interleave: Option<u32>,
}

#[test]
fn orders_are_those_of_their_definition() {
    let cases: Vec<Case> = serde_json::from_str(include_str!("../../../tests/golden/orders.json")).unwrap();
    assert!(cases.iter().any(|case| case.window.is_some()) && cases.iter().any(|case| case.window.is_none()));
    for Case { shards, seed, epoch, order, micro, window, interleave } in cases {
        let positions = 0..shards.iter().sum::<u64>();
        let found: Vec<u64> = match (micro, window, interleave) {
            (Some(micro), Some(window), Some(interleave)) => {
                let settings = Windows { micro, window, interleave };
                let order = WindowOrder::new(&shards, settings, seed, Epoch(epoch));
                order.records(positions)
            }
            _ => {
                let order = RecordOrder::new(positions.end, seed, Epoch(epoch), true);
                positions.map(|position| order.record(position)).collect()
            }
        };
        assert_eq!(found, order, "{shards:?}, seed {seed}, epoch {epoch}");
    }
}
