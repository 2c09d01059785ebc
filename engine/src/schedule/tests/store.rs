//! Tests of the scheduler with a store of pages.

use super::*;
use crate::kv_cache::PageFolder;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// What one scheduler leaves in a store is used by the next.
    #[test]
    fn every_request_gets_its_answer_with_a_store_of_pages(
        (capacity, requests) in workload(),
        host_pages in prop_oneof![Just(0u64), 1u64..40],
        limit in prop_oneof![Just(None), (1u64..40).prop_map(Some)],
    ) {
        let page = capacity.block_size * size_of::<Content>();
        let folder = tempfile::tempdir().unwrap();
        let open = |pages| PageFolder::open(folder.path(), &model(), page, pages * (page as u64 + 100)).unwrap();
        let store = PageStore::start(page, host_pages * page as u64, limit.map(open)).unwrap();
        let store = Some(Arc::new(store));
        for _ in 0..2 {
            let counts = run_with_store(capacity, &requests, store.clone());
            prop_assert!(counts.loaded_tokens.iter().sum::<u64>() == 0 || capacity.keep_prefixes);
        }
    }
}

#[test]
fn a_prompt_that_left_the_device_is_loaded_and_not_computed() {
    let page = 4 * size_of::<Content>();
    let requests = [request(40, 4), TestRequest { prompt: vec![5; 40], at: 20, ..request(40, 4) }];
    let again = [request(40, 4)];
    for (host_pages, in_folder, loaded) in [(0, false, [0, 0]), (40, false, [36, 0]), (0, true, [0, 36])] {
        let folder = tempfile::tempdir().unwrap();
        let open = || PageFolder::open(folder.path(), &model(), page, 1 << 20).unwrap();
        let start = || PageStore::start(page, host_pages * page as u64, in_folder.then(open)).unwrap();
        let store = Arc::new(start());
        // The second prompt evicts the first, and the third the second.
        let few = capacity(64, 1, 11);
        assert_eq!(run_with_store(few, &requests, Some(store.clone())).loaded_tokens, [0, 0]);
        let next = [TestRequest { prompt: vec![6; 40], ..request(40, 4) }];
        run_with_store(few, &next, Some(store.clone()));
        assert_eq!(run_with_store(few, &again, Some(store.clone())).loaded_tokens, loaded);
        // After a restart there is only what the folder has.
        store.finish();
        let counts = run_with_store(few, &again, Some(Arc::new(start())));
        assert_eq!(counts.loaded_tokens, if in_folder { [0, 36] } else { [0, 0] });
        assert_eq!(counts.prefix_hit_tokens, counts.loaded_tokens[1]);
    }
}
