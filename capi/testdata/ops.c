// Right calls of every operator give the right numbers. The gradients, for dout = (1 0), with be = beta e and the transposed recurrence:
//	dS = q dout^T = (1 0; 2 0)     d(be) = dS^T k = (-1 0)     dbeta = e.d(be) = -6     de = dv = (-1/2 0)     dq = S dout = (4 0)
//	dk = dS be - S~ de = (3 6) + (1/2 3/2)     dS~ = dS - k de^T = (3/2 0; 3/2 0)     dg = sum(dS~ S~) = 6     dh0 = dS~/2
#include "check.h"

int main(void) {
	one_token x;
	set_one_token(&x);
	int64_t tape_size = gdn_fwd_TAPE(1, 1, 1, 1, 2, 2, 1);
	float *tape = calloc((size_t)tape_size, sizeof *tape);
	tensor ttape;
	x.a.tape = &view(&ttape, tape, 1, tape_size, 0, 0, 0)->t;
	CHECK(gdn_supports("fwd", &x.a) == GDN_OK);
	CHECK(x.o[0] == 0 && x.o[1] == 0); // asking runs nothing
	CHECK(gdn_fwd(&x.a) == GDN_OK);
	CHECK(same(x.o, want_o, 2) && same(x.ht, want_ht, 4));
	CHECK(strcmp(gdn_last_error(), "") == 0);

	float dout[2] = {1, 0}, dq[2], dk[2], dv[2], dg[1], dbeta[1], dh0[4];
	tensor tdout, tdq, tdk, tdv, tdg, tdbeta, tdh0;
	gdn_bwd_args b = {0};
	b.size = sizeof b;
	b.q = x.a.q, b.k = x.a.k, b.v = x.a.v, b.g = x.a.g, b.beta = x.a.beta, b.initial_state = x.a.initial_state, b.tape = x.a.tape;
	b.dout = &view(&tdout, dout, 4, 1, 1, 1, 2)->t;
	b.dq = &view(&tdq, dq, 4, 1, 1, 1, 2)->t;
	b.dk = &view(&tdk, dk, 4, 1, 1, 1, 2)->t;
	b.dv = &view(&tdv, dv, 4, 1, 1, 1, 2)->t;
	b.dg = &view(&tdg, dg, 3, 1, 1, 1, 0)->t;
	b.dbeta = &view(&tdbeta, dbeta, 3, 1, 1, 1, 0)->t;
	b.dh0 = &view(&tdh0, dh0, 4, 1, 1, 2, 2)->t;
	b.scale = 1;
	static const double want_dq[] = {4, 0}, want_dk[] = {3.5, 7.5}, want_dv[] = {-0.5, 0}, want_dg[] = {6}, want_dbeta[] = {-6},
	                    want_dh0[] = {0.75, 0, 0.75, 0};
	CHECK(gdn_bwd(&b) == GDN_OK);
	CHECK(same(dq, want_dq, 2) && same(dk, want_dk, 2) && same(dv, want_dv, 2) && same(dg, want_dg, 1) && same(dbeta, want_dbeta, 1) &&
	      same(dh0, want_dh0, 4));
	free(tape);

	// The same by the token form.
	gdn_recurrent_fwd_args r = {0};
	tensor ttokens;
	int64_t tokens_size = gdn_recurrent_fwd_TAPE(1, 1, 1, 1, 2, 2, 1);
	float *tokens = calloc((size_t)tokens_size + 1, sizeof *tokens);
	set_one_token(&x);
	r.size = sizeof r;
	r.q = x.a.q, r.k = x.a.k, r.v = x.a.v, r.g = x.a.g, r.beta = x.a.beta, r.initial_state = x.a.initial_state;
	r.o = x.a.o, r.final_state = x.a.final_state, r.tape = &view(&ttokens, tokens, 1, tokens_size, 0, 0, 0)->t;
	r.scale = 1;
	CHECK(gdn_recurrent_fwd(&r) == GDN_OK);
	CHECK(same(x.o, want_o, 2) && same(x.ht, want_ht, 4));

	gdn_recurrent_bwd_args rb = {0};
	rb.size = sizeof rb;
	rb.q = b.q, rb.k = b.k, rb.v = b.v, rb.g = b.g, rb.beta = b.beta, rb.initial_state = b.initial_state, rb.tape = r.tape, rb.dout = b.dout;
	rb.dq = b.dq, rb.dk = b.dk, rb.dv = b.dv, rb.dg = b.dg, rb.dbeta = b.dbeta, rb.dh0 = b.dh0;
	rb.scale = 1;
	memset(dk, 0, sizeof dk);
	CHECK(gdn_recurrent_bwd(&rb) == GDN_OK);
	CHECK(same(dq, want_dq, 2) && same(dk, want_dk, 2) && same(dv, want_dv, 2) && same(dg, want_dg, 1) && same(dbeta, want_dbeta, 1) &&
	      same(dh0, want_dh0, 4));

	free(tokens);

	// Once more from slot 2 of a pool to slot 1; then indices that lead out of the pool, which change nothing.
	gdn_decode_args d = {0};
	float pool[12] = {-1, -1, -1, -1, -1, -1, -1, -1, 2, 4, 6, 8};
	int64_t slots[2] = {1, 2}, accepted = 2;
	tensor tpool, tslots, taccepted;
	set_one_token(&x);
	d.size = sizeof d;
	d.q = x.a.q, d.k = x.a.k, d.v = x.a.v, d.g = x.a.g, d.beta = x.a.beta, d.o = x.a.o;
	d.pool = &view(&tpool, pool, 4, 3, 1, 2, 2)->t;
	d.ssm_state_indices = &view(&tslots, slots, 2, 1, 2, 0, 0)->t;
	d.num_accepted_tokens = &view(&taccepted, &accepted, 1, 1, 0, 0, 0)->t;
	tslots.t.dtype.code = taccepted.t.dtype.code = kDLInt, tslots.t.dtype.bits = taccepted.t.dtype.bits = 64;
	d.scale = 1;
	d.in_place = 1;
	static const double untouched[] = {-1, -1, -1, -1, 2, 4, 6, 8};
	CHECK(gdn_decode(&d) == GDN_OK);
	CHECK(same(x.o, want_o, 2) && same(pool, untouched, 4) && same(pool + 4, want_ht, 4) && same(pool + 8, untouched + 4, 4));
	slots[0] = 3, x.o[0] = 5;
	CHECK(gdn_decode(&d) == GDN_INVALID_ARGUMENT);
	CHECK(strcmp(gdn_last_error(), "gdn_decode: ssm_state_indices[0, 0] is 3, expected less than P=3, or a negative number for padding") == 0);
	CHECK(x.o[0] == 5 && same(pool, untouched, 4) && same(pool + 4, want_ht, 4) && same(pool + 8, untouched + 4, 4));
	accepted = 3;
	CHECK(gdn_decode(&d) == GDN_INVALID_ARGUMENT);
	CHECK(strcmp(gdn_last_error(), "gdn_decode: num_accepted_tokens[0] is 3, expected 1 to R=2") == 0);

	// A gate of 0 is -softplus(0) = -log 2, summed over two tokens; its gradients are -sigmoid(0) = -1/2 by the raw gate, once for each sum.
	gdn_gate_fwd_args gf = {0};
	float raw[2] = {0, 0}, gy[2], ones[2] = {1, 1}, draw[2];
	tensor traw, tgy, tones, tdraw;
	gf.size = sizeof gf;
	gf.g = &view(&traw, raw, 4, 1, 2, 1, 1)->t, gf.y = &view(&tgy, gy, 4, 1, 2, 1, 1)->t;
	gf.gate = 1, gf.chunk = 2;
	static const double want_gy[] = {-0.69314718, -1.38629436}, want_draw[] = {-1, -0.5};
	CHECK(gdn_gate_fwd(&gf) == GDN_OK && same(gy, want_gy, 2));
	gdn_gate_bwd_args gb = {0};
	gb.size = sizeof gb;
	gb.g = gf.g, gb.dout = &view(&tones, ones, 4, 1, 2, 1, 1)->t, gb.dg = &view(&tdraw, draw, 4, 1, 2, 1, 1)->t;
	gb.gate = 1, gb.chunk = 2;
	CHECK(gdn_gate_bwd(&gb) == GDN_OK && same(draw, want_draw, 2));
	gf.bound = -5;
	CHECK(gdn_gate_fwd(&gf) == GDN_INVALID_ARGUMENT && strstr(gdn_last_error(), "bound is -5 and gate is 1"));

	// (3 4) divided by 5, and the gradient of its first element: (1 - 9/25, -12/25)/5.
	gdn_norm_fwd_args nf = {0};
	float row[2] = {3, 4}, unit[2], first[2] = {1, 0}, drow[2];
	tensor trow, tunit, tfirst, tdrow;
	nf.size = sizeof nf;
	nf.x = &view(&trow, row, 4, 1, 1, 1, 2)->t, nf.y = &view(&tunit, unit, 4, 1, 1, 1, 2)->t;
	static const double want_unit[] = {0.6, 0.8}, want_drow[] = {0.128, -0.096};
	CHECK(gdn_norm_fwd(&nf) == GDN_OK && same(unit, want_unit, 2));
	gdn_norm_bwd_args nb = {0};
	nb.size = sizeof nb;
	nb.x = nf.x, nb.dout = &view(&tfirst, first, 4, 1, 1, 1, 2)->t, nb.dx = &view(&tdrow, drow, 4, 1, 1, 1, 2)->t;
	CHECK(gdn_norm_bwd(&nb) == GDN_OK && same(drow, want_drow, 2));

	// Two taps (10 1) over 1 2 3 with 4 before them, and the gradients for dout = 1.
	gdn_conv_fwd_args cf = {0};
	float in[3] = {1, 2, 3}, taps[2] = {10, 1}, before[1] = {4}, out[3], last[1], dout3[3] = {1, 1, 1}, din[3], dtaps[2], dbefore[1];
	tensor tin, ttaps, tbefore, tout, tlast, tdout3, tdin, tdtaps, tdbefore;
	cf.size = sizeof cf;
	cf.x = &view(&tin, in, 3, 1, 3, 1, 0)->t, cf.weight = &view(&ttaps, taps, 2, 1, 2, 0, 0)->t;
	cf.initial_state = &view(&tbefore, before, 3, 1, 1, 1, 0)->t;
	cf.y = &view(&tout, out, 3, 1, 3, 1, 0)->t, cf.final_state = &view(&tlast, last, 3, 1, 1, 1, 0)->t;
	cf.dilation = 1, cf.state_len = 1;
	static const double want_out[] = {41, 12, 23}, want_last[] = {3}, want_din[] = {11, 11, 1}, want_dtaps[] = {7, 6}, want_dbefore[] = {10};
	CHECK(gdn_conv_fwd(&cf) == GDN_OK && same(out, want_out, 3) && same(last, want_last, 1));
	gdn_conv_bwd_args cb = {0};
	cb.size = sizeof cb;
	cb.x = cf.x, cb.weight = cf.weight, cb.initial_state = cf.initial_state, cb.dout = &view(&tdout3, dout3, 3, 1, 3, 1, 0)->t;
	cb.dx = &view(&tdin, din, 3, 1, 3, 1, 0)->t, cb.dweight = &view(&tdtaps, dtaps, 2, 1, 2, 0, 0)->t;
	cb.dh0 = &view(&tdbefore, dbefore, 3, 1, 1, 1, 0)->t;
	cb.dilation = 1, cb.state_len = 1;
	CHECK(gdn_conv_bwd(&cb) == GDN_OK && same(din, want_din, 3) && same(dtaps, want_dtaps, 2) && same(dbefore, want_dbefore, 1));
	cf.state_len = 0;
	CHECK(gdn_conv_fwd(&cf) == GDN_INVALID_ARGUMENT);

	CHECK(strcmp(gdn_version(), GDN_VERSION) == 0);
	CHECK(strstr(gdn_build_info(), "libgdn " GDN_VERSION) && strstr(gdn_build_info(), gdn_isa()) && strlen(gdn_isa()) > 0);
	CHECK(gdn_set_num_threads(1) == GDN_OK && gdn_get_num_threads() == 1);
	CHECK(gdn_set_num_threads(0) == GDN_INVALID_ARGUMENT && gdn_get_num_threads() == 1);
	return 0;
}
