//! Makes a failing world small: fewer faults, requests, volumes and nodes, as long as it fails in
//! the same way. What is left is short enough to read.

use crate::drive::{Played, Trace, run};
use crate::plan::{Numbers, Orders, Plan};

/// A failing world and how to repeat it.
#[derive(Clone, Debug)]
pub struct Shrunk {
    /// What is left.
    pub orders: Orders,
    /// The run of what is left.
    pub result: Played,
    /// Worlds that were tried.
    pub tries: u32,
}

/// The kind of a violation: its text without numbers and names.
pub fn kind(violation: &str) -> String {
    let head = violation.split([';', '[']).next().unwrap_or_default();
    let words: Vec<&str> = head
        .split(|c: char| !c.is_ascii_alphabetic())
        .filter(|word| word.len() > 1)
        .take(12)
        .collect();
    words.join(" ")
}

/// Leaves out what is not needed for the failure. `budget` bounds the events that it may spend.
pub fn shrink(seed: u64, orders: &Orders, found: &Played, budget: u64) -> Shrunk {
    shrink_by(seed, orders, found, budget, |orders| {
        run(seed, orders, Trace::Off)
    })
}

fn shrink_by(
    seed: u64,
    orders: &Orders,
    found: &Played,
    budget: u64,
    play: impl Fn(&Orders) -> Played,
) -> Shrunk {
    let Some(violation) = &found.violation else {
        return Shrunk {
            orders: orders.clone(),
            result: found.clone(),
            tries: 0,
        };
    };
    let mut search = Search {
        seed,
        wanted: kind(violation),
        best: orders.clone(),
        result: found.clone(),
        left: budget,
        tries: 0,
        play,
    };
    search.smaller_cluster();
    // What came after the failure is not needed.
    for _ in 0..3 {
        let before = search.size();
        search.drop_faults();
        search.drop_requests();
        if search.size() == before {
            break;
        }
    }
    Shrunk {
        orders: search.best,
        result: search.result,
        tries: search.tries,
    }
}

struct Search<F> {
    play: F,
    seed: u64,
    wanted: String,
    best: Orders,
    result: Played,
    left: u64,
    tries: u32,
}

impl<F: Fn(&Orders) -> Played> Search<F> {
    /// Fails in the same way, so it is the best from now on.
    fn accept(&mut self, orders: Orders) -> bool {
        if self.left == 0 {
            return false;
        }
        let result = (self.play)(&orders);
        self.tries += 1;
        self.left = self.left.saturating_sub(result.steps.max(1000));
        let same = result
            .violation
            .as_ref()
            .is_some_and(|v| kind(v) == self.wanted);
        if same {
            self.best = orders;
            self.result = result;
        }
        same
    }

    fn size(&self) -> (usize, usize) {
        let plan = Plan::new(self.seed, &self.best);
        (plan.faults.len(), plan.requests.len())
    }

    fn smaller_cluster(&mut self) {
        let plan = Plan::new(self.seed, &self.best);
        for nodes in 2..plan.config.nodes {
            let orders = Orders {
                nodes: Some(nodes),
                ..self.best.clone()
            };
            if self.accept(orders) {
                break;
            }
        }
        if plan.config.volumes > 1 {
            let orders = Orders {
                volumes: Some(1),
                ..self.best.clone()
            };
            self.accept(orders);
        }
    }

    fn drop_faults(&mut self) {
        let plan = Plan::new(self.seed, &self.best);
        let numbers: Vec<u32> = plan.faults.iter().map(|f| f.number).collect();
        self.reduce(numbers, |best, kept| Orders {
            only_faults: Some(Numbers::of(kept)),
            ..best.clone()
        });
    }

    fn drop_requests(&mut self) {
        let plan = Plan::new(self.seed, &self.best);
        let numbers: Vec<u32> = plan.requests.iter().map(|r| r.number).collect();
        self.reduce(numbers, |best, kept| Orders {
            only_requests: Some(Numbers::of(kept)),
            ..best.clone()
        });
    }

    /// Leaves out parts of the list, large ones first, the last ones first.
    fn reduce(&mut self, mut kept: Vec<u32>, orders: impl Fn(&Orders, &[u32]) -> Orders) {
        let mut part = kept.len();
        while part > 0 && self.left > 0 {
            let mut end = kept.len();
            while end > 0 {
                let from = end.saturating_sub(part);
                let mut fewer = kept.clone();
                fewer.drain(from..end);
                if self.accept(orders(&self.best, &fewer)) {
                    kept = fewer;
                }
                end = from;
            }
            part /= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Size;

    /// A world that fails exactly if two of its faults and one of its requests are there.
    fn played(orders: &Orders) -> Played {
        let plan = Plan::new(9, orders);
        let has = |n| plan.faults.iter().any(|f| f.number == n);
        let asks = |n| plan.requests.iter().any(|r| r.number == n);
        let fails = has(3) && has(7) && asks(1111);
        Played {
            violation: fails.then(|| format!("block {} is lost", plan.requests.len())),
            steps: 1,
            ..Played::nothing(9)
        }
    }

    #[test]
    fn only_what_the_failure_needs_is_left() {
        let orders = Orders {
            size: Size::Small,
            ..Orders::default()
        };
        let found = played(&orders);
        let small = shrink_by(9, &orders, &found, 10_000_000, played);
        assert_eq!(small.orders.only_faults, Some(Numbers::of(&[3, 7])));
        assert_eq!(small.orders.only_requests, Some(Numbers::of(&[1111])));
        assert!(small.result.violation.is_some());
        assert!(
            small
                .orders
                .command(9)
                .contains("--only-faults 3,7 --only-requests 1111")
        );
    }

    #[test]
    fn numbers_and_names_do_not_make_another_kind() {
        let a = "B reads what it must not: volume 0 block 7: read 3 at 5..6; history: [1]";
        let b = "A reads what it must not: volume 1 block 99: read 4 at 7..9; history: [2]";
        assert_eq!(kind(a), kind(b));
        assert_ne!(kind(a), kind("several Primaries: ['A', 'B']"));
    }
}
