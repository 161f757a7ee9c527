//! What clients of the process-group store send. The encoder is in torch (`TCPStore.cpp`); this one
//! writes the same bytes.

use crate::Seeds;

/// Longest piece of an input.
const PIECE_BYTES_MAX: usize = 127;

/// A query: its type, then strings behind their lengths, and numbers.
struct Query(Vec<u8>);

impl Query {
    fn number(mut self, number: u64) -> Self {
        self.0.extend(number.to_le_bytes());
        self
    }

    fn text(self, text: &str) -> Self {
        let mut query = self.number(text.len() as u64);
        query.0.extend(text.as_bytes());
        query
    }

    fn texts(self, texts: &[&str]) -> Self {
        texts.iter().fold(self.number(texts.len() as u64), |query, text| query.text(text))
    }
}

fn query(kind: u8) -> Query {
    Query(vec![kind])
}

/// Joins the queries of one client that are sent at once.
fn sent(client: u8, queries: &[Query]) -> Vec<u8> {
    let bytes: Vec<u8> = queries.iter().flat_map(|query| &query.0).copied().collect();
    let head = |piece: &[u8]| ((piece.len() as u8) << 1) | client;
    bytes.chunks(PIECE_BYTES_MAX).flat_map(|piece| [[head(piece)].as_slice(), piece].concat()).collect()
}

/// Returns exchanges between two clients and the store.
pub fn sessions() -> Seeds {
    let set = |key: &str, value: &str| query(1).text(key).text(value);
    let get = |key: &str| query(3).text(key);
    let wait = |keys: &[&str]| query(6).texts(keys);
    let (pop, length) = (|key: &str| query(15).text(key), |key: &str| query(16).text(key));
    let amount = |key: &str, amount: i64| query(4).text(key).number(amount.cast_unsigned());
    let nonce = Query([[13].as_slice(), &7u32.to_le_bytes()].concat());
    vec![
        ("set-get", sent(0, &[set("k", "value"), get("k"), get("missing")])),
        ("compare-set", sent(0, &[query(2).text("k").text("").text("1"), query(2).text("k").text("1").text("2")])),
        ("add", sent(0, &[amount("n", 5), amount("n", -7), get("n")])),
        ("check", sent(0, &[set("k", "v"), query(5).texts(&["k"]), query(5).texts(&["k", "x"])])),
        ("wait-then-set", [sent(0, &[wait(&["a", "b"])]), sent(1, &[set("a", "1"), set("b", "2")])].concat()),
        ("wait-cancelled", [sent(0, &[wait(&["a"])]), sent(0, &[query(12)]), sent(1, &[set("a", "1")])].concat()),
        ("wait-left-open", [sent(1, &[wait(&["a"])]), sent(0, &[wait(&["a", "a", "c"])])].concat()),
        ("both-wait", [sent(0, &[wait(&["q"])]), sent(1, &[wait(&["q"])]), sent(0, &[query(12)])].concat()),
        ("append", sent(0, &[query(9).text("k").text("ab"), query(9).text("k").text("c"), get("k")])),
        (
            "several",
            sent(0, &[query(11).number(2).text("a").text("1").text("b").text("2"), query(10).texts(&["a", "b"])]),
        ),
        ("queue", sent(0, &[query(14).text("q").text("1"), length("q"), pop("q"), pop("q"), length("q")])),
        ("names", sent(0, &[set("a", "1"), query(14).text("q").text("1"), query(17), query(7)])),
        ("delete", sent(0, &[set("a", "1"), query(8).text("a"), query(8).text("a"), query(7)])),
        ("ping", sent(1, &[nonce])),
        ("cut-short", sent(1, &[Query(set("k", "value").0[..12].to_vec())])),
        ("too-long", sent(0, &[query(1).number(1 << 40)])),
    ]
}
